"""Keys that are nearly those of a precision setting: most tools drop what they do not know without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from ....finding import Finding
from ..identify import KEYS as TOOLS
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
    "deepspeed": "bf16 fp16 data_types torch_autocast grad_accum_dtype communication_data_type zero_optimization",
    "lightning": "precision",
    "torchtune": "dtype",
    "model": "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit torch_dtype",
}

_SECTIONED = ("deepspeed",)  # tools whose precision settings are sections
_WORDS = frozenset(" ".join(chain.from_iterable(TOOLS.values())).split())  # keys of any tool are no misspellings


@rule("CF063")
def near_miss_keys(r: Record) -> Iterator[Finding]:
    """A key that is nearly a precision setting

    **Why it matters.** `bf_16: true` is no setting of any trainer, nor is `mixed_precison: bf16`. Settings are often read key by key,
    and a key that nothing asks for is dropped without a warning: the run trains in fp32, or in the launcher's precision.

    **Example.** `bf_16: true` in axolotl's YAML; `mixed-precision: bf16` in a kohya TOML.

    **What to do.** The key as the tool writes it.
    """
    for document in r.facts.documents:
        for key, part, meant in _near_misses(document):
            setting = document.settings[key]
            shown = str(setting.value).lower() if isinstance(setting.value, bool) else setting.value
            yield warning(
                f"{setting.key if key.endswith(part) else part} is no setting of {document.tool}: {meant} is",
                setting,
                cause=f"the key differs from {meant} by its spelling only, and a key that is not known has no effect",
                fix=f"{meant}: {shown}" if key.endswith(part) else f"write {part} as {meant}",
                wins=f"the tool refuses the key, or leaves {meant} at its default",
            )


def _near_misses(document: Document) -> Iterator[tuple[str, str, str]]:
    """Keys of the document with the part of them that is misspelt and the settings it may stand for, `bf16 or fp16`."""
    known = _KEYS.get(document.tool, "").split()
    told = set()
    for key, setting in document.settings.items():
        parts = key.split(".")
        last = len(parts) - 1
        for number in sorted({0, last} if document.tool in _SECTIONED else {last}):
            part, before = parts[number], ".".join(parts[:number])
            meant = [word for word in known if _letters(word) == _letters(part)] or [word for word in known if _one_edit(part, word)]
            meant = [word for word in meant if f"{before}.{word}".strip(".") not in document.settings]
            if not meant or part in known or part in _WORDS or part.isupper() or (before, part) in told:
                continue
            # a command line takes dashes as well
            if not (setting.key.startswith("-") and part.replace("-", "_") in known):
                told.add((before, part))
                yield key, part, " or ".join(meant)


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _one_edit(written: str, word: str) -> bool:
    """Whether one letter more, less, other or exchanged with its neighbour makes `written` the word; its digits are the same.

    Words of fewer than eight letters without a digit have neighbours of their own (`type` and `dtype`), and are left out.
    """
    a, b = _letters(written), _letters(word)
    if re.sub(r"\D", "", a) != re.sub(r"\D", "", b) or not (len(b) >= 8 or re.search(r"\d", b)):
        return False
    i = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    exchanged = len(a) == len(b) and a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :]
    return a != b and (exchanged or a[i + 1 :] in (b[i + 1 :], b[i:]) or a[i:] == b[i + 1 :])
