"""Words that a tool's own validator refuses, and words that a newer version calls by another name."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from ....finding import Finding
from ..record import Record
from ..settings import Setting
from .base import error, rule

_QUANTISED = (
    "no_change int8-quanto int4-quanto int2-quanto int8-torchao int8dq-torchao int8dq-int4-torchao int8-sdnq uint8-sdnq int16-sdnq "
    "uint16-sdnq fp16-sdnq fp8-sdnq int6-sdnq int5-sdnq uint5-sdnq uint4-sdnq uint3-sdnq uint2-sdnq nf4-bnb int4-torchao fp8-quanto "
    "fp8uz-quanto fp8-native fp8-torchao fp8wo-torchao fp8-int4-torchao fp8-transformerengine"
)
# setting -> (the words that its validator takes, the versions whose validator was read)
_WORDS: dict[str, tuple[str, str]] = {
    "simpletuner.base_model_precision": (_QUANTISED, "SimpleTuner of 2026-08"),
    "simpletuner.gradient_precision": ("unmodified fp32", "SimpleTuner of 2026-08"),
    "simpletuner.vae_dtype": ("default fp32 fp16 bf16", "SimpleTuner of 2026-08"),
    "simpletuner.base_model_default_dtype": ("bf16 fp32", "SimpleTuner of 2026-08"),
    "llamafactory.flash_attn": ("auto disabled sdpa fa2 fa3", "LLaMA-Factory of 2026"),
    "llamafactory.quantization_method": ("bnb gptq awq aqlm quanto eetq hqq mxfp4 fp8", "LLaMA-Factory since 0.9.3"),
    "llamafactory.infer_dtype": ("auto float16 bfloat16 float32", "LLaMA-Factory of 2026"),
} | {f"simpletuner.text_encoder_{n}_precision": (_QUANTISED, "SimpleTuner of 2026-08") for n in (1, 2, 3, 4)}
# (setting, word of an older version, as text) -> the word of the newer one
_RENAMED = {
    ("llamafactory.quantization_method", "bitsandbytes"): "bnb",
    ("llamafactory.flash_attn", "true"): "fa2",
    ("llamafactory.flash_attn", "false"): "disabled",
    ("llamafactory.flash_attn", "off"): "disabled",
    ("simpletuner.base_model_precision", "int8"): "int8-quanto",
    ("simpletuner.base_model_precision", "nf4"): "nf4-bnb",
    ("simpletuner.base_model_precision", "fp8"): "fp8-torchao",
}


@rule("CF064")
def refused_values(r: Record) -> Iterator[Finding]:
    """A word that the tool's validator refuses

    **Why it matters.** Each tool takes a list of words for a precision, and the words change between versions:
    `quantization_method: bitsandbytes` became `bnb`. The run stops when its arguments are read.

    **Example.** `"base_model_precision": "int8"` for SimpleTuner, which wants to be told the library: `int8-quanto`.

    **What to do.** One of the words listed.
    """
    for key, (words, version) in _WORDS.items():
        setting = r.facts.get(key)
        if setting is None or setting.value is None or _shown(setting) in words.split() or "$" in _shown(setting):
            continue
        newer = _RENAMED.get((key, _shown(setting)))
        close = get_close_matches(_shown(setting), words.split(), n=1)
        best = newer or (close[0] if close else words.split()[0])
        yield error(
            f"{setting.key}: {_shown(setting)} is not one of the words that {r.tool} takes",
            setting,
            cause=f"older versions took {_shown(setting)}; the validator takes: {words}" if newer else f"the validator takes: {words}",
            fix=f"{setting.key}: {best}",
            wins="the run stops when its arguments are read",
            holds=version,
        )


def _shown(setting: Setting) -> str:
    value = setting.value
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
