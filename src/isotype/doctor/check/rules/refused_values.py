"""Settings and words that a release of a tool does not have: `releases.py` has the table."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from ....finding import Finding
from ..record import Record
from ..releases import NEWEST, given
from ..settings import Setting, truth
from .base import error, rule, warning

# (setting, word of an older version, as text) -> the word of the newer one
_RENAMED = {
    ("llamafactory.quantization_method", "bitsandbytes"): "bnb",
    ("llamafactory.flash_attn", "true"): "fa2",
    ("llamafactory.flash_attn", "false"): "disabled",
    ("llamafactory.flash_attn", "off"): "disabled",
    ("simpletuner.base_model_precision", "int8"): "int8-quanto",
    ("simpletuner.base_model_precision", "nf4"): "nf4-bnb",
    ("simpletuner.base_model_precision", "fp8"): "fp8-torchao",
    ("axolotl.attn_implementation", "flash"): "flash_attention_2",
}
_UNKNOWN_KEYS = {  # what a tool does with a key that it does not know
    "axolotl": (warning, "axolotl drops keys that it does not know, without a word"),
    "llamafactory": (error, "LLaMA-Factory stops: arguments that no parser uses"),
    "accelerate": (warning, "the launcher drops what it does not know in a section, and stops at keys of its own level"),
    "trl": (error, "TRL stops: unexpected argument"),
    "transformers": (error, "transformers stops: TypeError, unexpected keyword argument"),
}
_STILL_NAMED = ("axolotl.unsloth_", "axolotl.flash_attn_rms_norm")  # newer releases know the name in order to refuse it


@rule("CF064")
def refused_values(r: Record) -> Iterator[Finding]:
    """A word that the tool's validator refuses

    **Why it matters.** Each tool takes a list of words for a precision, and the words change between versions:
    `quantization_method: bitsandbytes` became `bnb`. The run stops when its arguments are read. Where a requirements or lock file
    pins the tool, its words of that version count, else those of the newest one that was read.

    **Example.** `"base_model_precision": "int8"` for SimpleTuner, which wants to be told the library: `int8-quanto`.

    **What to do.** One of the words listed.
    """
    for asked in given(r.facts):
        setting, span, word = asked.setting, asked.span, _shown(asked.setting)
        if span is None or span.takes(word) or "$" in word:
            continue
        elsewhere = next((s for s in asked.spans if s is not span and s.words and s.takes(word)), None)
        renamed = _RENAMED.get((span.setting, word))
        close = get_close_matches(word.lower(), {w.lower(): w for w in span.words}, n=1)
        best = renamed or next((w for w in span.words if w.lower() in close), span.words[0])
        words = " ".join(w for w in span.words if w != "/")
        yield error(
            f"{setting.key}: {word} is not one of the words that {r.tool or span.package} takes",
            setting,
            asked.pinned,
            cause=f"{elsewhere.releases} took {word}; the validator takes: {words}"
            if elsewhere
            else f"older versions took {word}; the validator takes: {words}"
            if renamed
            else f"the validator takes: {words}",
            fix=f"{setting.key}: {best}",
            wins="the run stops when its arguments are read",
            holds=span.releases,
        )


@rule("CF040")
def missing_settings(r: Record) -> Iterator[Finding]:
    """A setting that the tool's version does not have

    **Why it matters.** Arguments come and go with versions: transformers 5 raises "unexpected keyword argument" for
    `half_precision_backend`, TRL 0.28 for `use_liger_loss`; axolotl before 0.17 drops `fp32_norms` without a word, and accelerate before
    1.6 knows no `fsdp_version` and takes FSDP1. Where no version is pinned, only what the newest one has lost is told.

    **Example.** `half_precision_backend: auto`, `no_cuda: true`; `fp32_norms: true` beside `axolotl==0.15.0`.

    **What to do.** The newer name, or a version that has the setting.
    """
    for asked in given(r.facts):
        setting, pinned, first, last = asked.setting, asked.pinned, asked.spans[0], asked.spans[-1]
        if asked.span is not None or (first.package == "axolotl" and truth(setting.value) is False):
            continue
        say, today = _UNKNOWN_KEYS[first.package]
        if asked.gone and last.setting.startswith(_STILL_NAMED):
            say, today = error, "axolotl stops at validation"
        written = pinned.key if pinned is not None else first.package
        yield say(
            f"{setting.key} no longer exists" if asked.gone else f"{setting.key} does not exist yet in {written}",
            setting,
            pinned,
            cause=f"{last.releases} has it, and newer releases do not" if asked.gone else f"{first.releases} has it",
            fix=(last.instead if " " in last.instead else f"{last.instead}: {_shown(setting)}")
            if asked.gone
            else f"{first.package}>={'.'.join(map(str, first.since))}, or remove it",
            wins=today,
            holds=f"{first.package} {NEWEST[first.package]}" if pinned is None else None,
        )


def _shown(setting: Setting) -> str:
    value = setting.value
    return str(value).lower() if isinstance(value, bool) else str(value).strip()
