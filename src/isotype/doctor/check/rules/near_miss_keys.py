"""Keys that are nearly those of a precision setting: most tools drop what they do not know without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..settings import Document
from .base import rule, warning

# settings of precision, by tool where only some have them; any of a flat file's tools may have the first group
_COMMON = "bf16 fp16 tf32 mixed_precision load_in_4bit load_in_8bit gradient_checkpointing torch_dtype"
_KEYS: dict[str, str] = {
    "hf": f"{_COMMON} bf16_full_eval fp16_full_eval fp16_opt_level half_precision_backend",
    "axolotl": f"{_COMMON} bfloat16 float16 bf16_full fp32_norms",
    "llamafactory": f"{_COMMON} pure_bf16 quantization_bit upcast_layernorm upcast_lmhead_output",
    "accelerate": "mixed_precision downcast_bf16",
    "simpletuner": "mixed_precision base_model_precision base_model_default_dtype gradient_precision vae_dtype",
    "kohya": "mixed_precision full_bf16 full_fp16 fp8_base no_half_vae save_precision",
    "model": "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit torch_dtype",
}


@rule("CF063")
def near_miss_keys(r: Record) -> Iterator[Finding]:
    """A key that is nearly a precision setting

    **Why it matters.** `bf_16: true` is no setting of any trainer. Settings are often read key by key, and what is not asked for is
    dropped without a word: the run trains in fp32, or in the launcher's precision.

    **Example.** `bf_16: true` in axolotl's YAML; `mixed-precision: bf16` in a kohya TOML.

    **What to do.** The key as the tool writes it.
    """
    for document in r.facts.documents:
        for key, meant in _near_misses(document):
            setting = document.settings[key]
            yield warning(
                f"{setting.key} is no setting of {document.tool}: {meant} is",
                setting,
                cause=f"the key differs from {meant} by its spelling only, and a key that is not known has no effect",
                fix=f"{meant}: {str(setting.value).lower() if isinstance(setting.value, bool) else setting.value}",
                wins=f"the tool refuses the key, or leaves {meant} at its default",
            )


def _near_misses(document: Document) -> Iterator[tuple[str, str]]:
    """Keys of the document, each with the setting that it is a misspelling of."""
    known = {_letters(word): word for word in _KEYS.get(document.tool, "").split()}
    for key, setting in document.settings.items():
        section, dot, last = key.rpartition(".")
        meant = known.get(_letters(last))
        if meant is None or last == meant or last.isupper() or f"{section}{dot}{meant}" in document.settings:
            continue
        # a command line takes dashes as well
        if not (setting.key.startswith("-") and last.replace("-", "_") == meant):
            yield key, meant


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())
