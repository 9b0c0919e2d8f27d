"""Rules about keys and values that a tool refuses or reads differently than they look, and about versions with known dtype faults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain

from ....finding import Finding
from ..identify import KEYS as TOOLS
from ..model_settings import deepspeed_setting, uses_deepspeed, uses_fsdp
from ..settings import Document, Record, Setting, truth
from ..versions import NEWEST, given, release
from .base import error, rule, warning

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


@rule("CF098")
def key_given_twice(r: Record) -> Iterator[Finding]:
    """A key is given twice in one file

    **Why it matters.** JSON and PyYAML take the later one, and print nothing.

    **Example.** `bf16: true` at the top, `bf16: false` further down.

    **What to do.** Remove one.
    """
    for document in r.facts.documents:
        for key, line in document.attributes.get("repeated", ()):
            setting = document.settings.get(key)
            shown = Setting(setting.value if setting else "...", key, document.file, line)
            yield warning(
                f"{key} is given twice",
                shown,
                cause="the later value is used, without a warning",
                fix="remove one of them",
                wins="the later one",
            )


@rule("CF029")
def env_read_two_ways(r: Record) -> Iterator[Finding]:
    """config.env means one thing to the shell and another to SimpleTuner

    **Why it matters.** SimpleTuner reads the file itself, line by line: it does not expand `${NAME}`, keeps a trailing comment as
    part of the value, and joins no
    continued lines. What is valid shell can be refused, or silently differ.

    **Example.** `TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --gradient_precision=unmodified"`.

    **What to do.** Write plain values, one a line, comments on their own lines; `TRAINER_EXTRA_ARGS+=" --flag"` to append.
    """
    for document in r.facts.documents:
        for name, (shell_value, own_value, _line) in document.attributes.get("own", {}).items():
            setting = document.settings.get(f"variable.{name}")
            yield warning(
                f"{name}: the shell reads {shell_value!r}, SimpleTuner {own_value!r}",
                setting,
                cause="SimpleTuner's own reader expands no variables, keeps trailing comments and joins no lines",
                fix=f'write the value out on one line: {name}="{shell_value}"',
                wins="SimpleTuner's reader, unless the file is sourced first",
            )


@rule("CF095")
def versions(r: Record) -> Iterator[Finding]:
    """Installed versions with known dtype faults

    **Why it matters.** Some faults belong to a version, not to a setting: DeepSpeed 0.7.6 to 0.8.0 has two checks of the
    accumulation dtype that contradict each
    other; torch 2.1 assigns gradients of the wrong dtype under FSDP; bitsandbytes on a CPU with AVX512-BF16 repacks 4-bit weights
    in place in an
    evaluation, and later LoRA gradients are wrong; Triton 3.9's CPU interpreter computes bf16 on raw bits.

    **Example.** `deepspeed==0.8.0` in requirements.txt with a bf16 ZeRO configuration.

    **What to do.** The command in the finding.
    """
    from ....environment.versions import known_fault

    f = r.facts

    def pinned(name: str) -> tuple[int, ...]:
        return release(str(f.value(f"versions.{name}", default="")))

    deepspeed = f.get("versions.deepspeed")
    if deepspeed and (0, 7, 6) <= pinned("deepspeed") <= (0, 8, 0) and (uses_deepspeed(f) or r.value("compute") == "bf16"):
        yield error(
            f"{deepspeed.key} contradicts itself about bf16 accumulation",
            deepspeed,
            deepspeed_setting(f, "bf16.enabled") or r.by("compute"),
            cause="its ZeRO check and its bf16 optimizer ask for different gradient accumulation data types",
            fix='pip install "deepspeed>=0.8.1"',
        )
    torch = f.get("versions.torch")
    if torch and pinned("torch")[:2] == (2, 1) and uses_fsdp(f):
        yield warning(
            f"{torch.key} assigns gradients of the wrong dtype under FSDP",
            torch,
            uses_fsdp(f),
            cause='torch 2.1: "attempting to assign a gradient with dtype" under FSDP with compile',
            fix='pip install "torch>=2.2"',
        )
    bnb = f.get("versions.bitsandbytes")
    if bnb and r.quantised == 4 and r.device is not None and r.device.kind == "cpu" and known_fault("bitsandbytes", str(bnb.value)):
        yield warning(
            f"{bnb.key} trains 4-bit weights wrongly on a CPU after an evaluation",
            bnb,
            r.quantised_by,
            cause="an evaluation repacks Linear4bit in place on CPUs with AVX512-BF16, and later LoRA gradients are wrong (cosine 0.24)",
            fix="for each Linear4bit: module.support_avx512bf16_for_cpu = False",
        )
    triton = f.get("versions.triton")
    if triton and f.on("env.TRITON_INTERPRET") and known_fault("triton", str(triton.value)):
        yield warning(
            f"{triton.key}: the CPU interpreter is wrong for bf16",
            triton,
            f.on("env.TRITON_INTERPRET"),
            cause="it truncates fp32 to bf16 and computes bf16 sums and products on raw bits",
            fix="test bf16 kernels on a GPU, or in fp32: unset TRITON_INTERPRET",
        )
