"""Rules that look at every key of a file: two halves side by side, words and keys that a tool refuses or drops, settings by release."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ....dtypes import torch_word
from ....finding import Finding
from ..model_settings import deepspeed_setting, fsdp_version, uses_fsdp
from ..python_calls import Name
from ..settings import NEWEST, Record, Setting, dtype_of, outside, release, truth
from .base import error, rule, warning

_PAIRS = (
    ("hf.bf16_full_eval", "hf.fp16_full_eval"),
    ("llamafactory.pure_bf16", "llamafactory.fp16"),
    ("kohya.full_bf16", "kohya.full_fp16"),
)


def _siblings(r: Record) -> Iterator[tuple[Setting, Setting]]:
    """`bf16` and `fp16` both on in the same section, for any tool."""
    for document in r.facts.documents:
        if document.tool in ("env", "versions", "checkpoint", "hardware", "code"):
            continue
        for key, fp16 in document.settings.items():
            prefix, _, last = key.rpartition(".")
            bf16 = document.settings.get(f"{prefix}.bf16" if prefix else "bf16")
            if last == "fp16" and bf16 is not None and truth(fp16.value) is truth(bf16.value) is True:
                yield bf16, fp16


@rule("CF001")
def both_halves(r: Record) -> Iterator[Finding]:
    """fp16 and bf16 are both on

    **Why it matters.** They exclude each other: bf16 has fp32's range and no loss scaling, fp16 needs it. Most trainers stop with "At most
    one of fp16 and bf16 can be True"; some go on with whichever they look at first.

    **Example.** `{"fp16": true, "bf16": true}`; a DeepSpeed file with both sections enabled; `bf16` for training and `fp16_full_eval`
    for evaluation under DeepSpeed's "auto".

    **What to do.** Keep one: bf16 on Ampere and newer, else fp16.
    """
    f = r.facts
    for bf16, fp16 in [*_siblings(r), *((f.on(one), f.on(other)) for one, other in _PAIRS)]:
        if bf16 and fp16:
            yield error(
                f"{fp16.key} and {bf16.key} are both on",
                fp16,
                bf16,
                cause="fp16 and bf16 exclude each other; both cannot be true at once",
                fix=f"keep only one: {bf16.key}: true with {fp16.key}: false where the GPU has bf16, else the reverse",
                wins="there is no error: bf16 weights run under fp16 autocast with a GradScaler"
                if "pure" in bf16.key
                else "the trainer refuses to start, or takes whichever it looks at first",
            )
    bf16, fp16 = deepspeed_setting(f, "bf16.enabled"), deepspeed_setting(f, "fp16.enabled")
    if bf16 and fp16 and truth(bf16.value) and truth(fp16.value):
        yield error(
            "DeepSpeed's fp16 and bf16 sections are both enabled",
            fp16,
            bf16,
            cause="DeepSpeed: bfloat16 and fp16 modes cannot be enabled at once; both sections are true",
            wins="DeepSpeed refuses to start",
            fix='keep one section enabled, and "enabled": false or "auto" in the other',
        )
    if bf16 and fp16 and str(bf16.value) == str(fp16.value) == "auto":
        for train, evaluate in (("hf.bf16", "hf.fp16_full_eval"), ("hf.fp16", "hf.bf16_full_eval")):
            flag, full = f.on(train), f.on(evaluate)
            if flag and full:
                yield error(
                    f"{flag.key} with {full.key} enables both of DeepSpeed's sections",
                    full,
                    flag,
                    fp16,
                    bf16,
                    cause=(
                        '"auto" takes a section on when either the training or the full_eval flag of that half is set: both '
                        "fp16 and bf16 are on"
                    ),
                    fix=f"evaluate in the same half as training: remove {full.key}",
                    wins="DeepSpeed refuses to start",
                )


_UNKNOWN_KEYS = {  # what a tool does with a key that it does not know
    "axolotl": (warning, "axolotl drops keys that it does not know, without a word"),
    "llamafactory": (error, "LLaMA-Factory stops: arguments that no parser uses"),
    "accelerate": (warning, "the launcher drops what it does not know in a section, and stops at keys of its own level"),
    "trl": (error, "TRL stops: unexpected argument"),
    "transformers": (error, "transformers stops: TypeError, unexpected keyword argument"),
}
_STILL_NAMED = ("axolotl.unsloth_", "axolotl.flash_attn_rms_norm")  # newer releases know the name in order to refuse it


@rule("CF040")
def missing_settings(r: Record) -> Iterator[Finding]:
    """A setting that the tool's version does not have

    **Why it matters.** Arguments come and go with versions: transformers 5 raises "unexpected keyword argument" for
    `half_precision_backend`, TRL 0.28 for `use_liger_loss`; axolotl before 0.17 drops `fp32_norms` without a word, and accelerate before
    1.6 knows no `fsdp_version` and takes FSDP1. Where no version is pinned, only what the newest one has lost is told.

    **Example.** `half_precision_backend: auto`, `no_cuda: true`; `fp32_norms: true` beside `axolotl==0.15.0`.

    **What to do.** The newer name, or a version that has the setting.
    """
    for setting, span, pinned in outside(r.facts):
        if span.package == "axolotl" and truth(setting.value) is False:
            continue
        gone = pinned is None or release(str(pinned.value)) > span.since
        say, today = _UNKNOWN_KEYS[span.package]
        if gone and span.setting.startswith(_STILL_NAMED):
            say, today = error, "axolotl stops at validation"
        written = pinned.key if pinned is not None else span.package
        yield say(
            f"{setting.key} no longer exists" if gone else f"{setting.key} does not exist yet in {written}",
            setting,
            pinned,
            cause=f"{span.releases} has it, and newer releases do not" if gone else f"{span.releases} has it",
            fix=(span.instead if " " in span.instead else f"{span.instead}: {_shown(setting)}")
            if gone
            else f"{span.package}>={'.'.join(map(str, span.since))}, or remove it",
            wins=today,
            holds=f"{span.package} {NEWEST[span.package]}" if pinned is None else None,
        )


def _shown(setting: Setting) -> str:
    value = setting.value
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


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


_NOT_TORCHS = ("bf16", "fp16", "fp32")
_NOT_FOR_STORAGE = ("half", "float", "double")  # attributes of torch, and yet not among the words that a storage dtype may be


@rule("CF043")
def word_not_looked_up(r: Record) -> Iterator[Finding]:
    """A dtype of weights in a word that is not found: `torch.bfloat16`, `bf16`

    **Why it matters.** `bnb_4bit_compute_dtype`, and a text given as `dtype` to `from_pretrained`, are handed to `getattr(torch, ...)`:
    "module torch has no attribute torch.bfloat16". `bnb_4bit_quant_storage` takes six words, and not `half`, `float` and `double`.

    **Example.** `"bnb_4bit_compute_dtype": "torch.bfloat16"`; `from_pretrained(..., dtype="bf16")`.

    **What to do.** `"bfloat16"`.
    """
    for document in r.facts.documents:
        if document.tool not in ("model", "hf", "peft", "axolotl"):
            continue
        done = set()
        for key, setting in document.settings.items():
            last, word = key.rpartition(".")[2], setting.value
            loaded = key in ("dtype", "torch_dtype") and document.attributes.get("reader") == "python" and document.tool == "model"
            looked_up = last in ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage") or (loaded and not document.attributes.get("unsloth"))
            if not looked_up or (last, setting.line) in done:
                continue
            if not isinstance(word, str) or isinstance(word, Name):
                continue
            stored = last == "bnb_4bit_quant_storage"
            if word.startswith("torch.") or word in _NOT_TORCHS or (stored and word in _NOT_FOR_STORAGE):
                done.add((last, setting.line))
                yield error(
                    f"{last} does not take {word!r}" if stored else f"{last}: {word!r} is not a name in torch",
                    setting,
                    cause="the string must be one of float16, bfloat16, float32, float64, int8 and uint8"
                    if stored
                    else "the string is looked up as an attribute of torch, and must be torch's own word without prefix",
                    fix=f'{last}: "{torch_word(dtype_of(word) or word.removeprefix("torch."))}"',
                    wins=f"loading stops with {'a ValueError' if stored else 'an AttributeError'}",
                )


_FP16_ONLY = {
    "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis", "auto_cast",
    "fp16_master_weights_and_grads",
}  # fmt: skip


@rule("CF055")
def deepspeed_foreign_keys(r: Record) -> Iterator[Finding]:
    """fp16's keys in DeepSpeed's bf16 section

    **Why it matters.** bf16 has no loss scaling, and unknown keys are forbidden.

    **Example.** `"bf16": {"enabled": true, "loss_scale_window": 1000}`.

    **What to do.** Remove them.
    """
    for document in r.facts.documents:
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if last in _FP16_ONLY and section.rpartition(".")[2] == "bf16" and (document.tool == "deepspeed" or "deepspeed" in key):
                yield error(
                    f"{last} does not belong in DeepSpeed's bf16 section",
                    setting,
                    cause=f"{last} is an fp16 loss scaling key; bf16 has none, and extra keys are refused",
                    fix=f"remove {last} from the bf16 section",
                    wins="DeepSpeed stops",
                )


_POLICY = re.compile(r"^(?:fsdp_config\.)?(?:fsdp_)?mixed_precision_policy(?:\.|$)")


@rule("CF060")
def policy_keys(r: Record) -> Iterator[Finding]:
    """A mixed precision policy with a key of the other FSDP version, or in a file that nobody reads it from

    **Why it matters.** FSDP1's policy has `buffer_dtype`, FSDP2's has `output_dtype`; accelerate refuses the wrong one. A policy is
    handed over in Python: neither `accelerate launch` nor the trainers' `fsdp_config` read one from a file, so that the dtypes
    written there have no effect, and everything follows mixed precision.

    **Example.** `FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy={"buffer_dtype": "bf16"})`;
    `fsdp_config: {mixed_precision_policy: {reduce_dtype: fp32}}` in accelerate's YAML.

    **What to do.** The keys of the version that is used; the policy in Python.
    """
    f = r.facts
    version, by = fsdp_version(f)
    for document in f.documents:
        if document.tool != "fsdp" or document.attributes.get("reader") != "python":
            policy = next((s for k, s in document.settings.items() if _POLICY.search(k)), None)
            if policy is not None:
                yield warning(
                    "mixed_precision_policy in a file has no effect",
                    policy,
                    by or uses_fsdp(f),
                    cause="neither accelerate's launcher nor the trainers read a policy from a file: every dtype follows mixed_precision",
                    fix="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the program, or remove it",
                    wins="FSDP casts, reduces and keeps buffers in the mixed precision",
                    holds="accelerate 1.15, transformers 5.23, axolotl 0.18",
                )
            continue
        for key, setting in document.settings.items():
            section, _, last = key.rpartition(".")
            if section.rpartition(".")[2].removeprefix("fsdp_") != "mixed_precision_policy":
                continue
            if (version == 2 and last == "buffer_dtype") or (version in (1, None) and last == "output_dtype"):
                other = "output_dtype" if version == 2 else "buffer_dtype"
                yield error(
                    f"{last} in the policy of FSDP{version or 1}",
                    setting,
                    by or uses_fsdp(f),
                    cause=f"the mixed precision policy of FSDP{version or 1} has param_dtype, reduce_dtype and {other}, and no {last}",
                    fix=f"{other} instead of {last}",
                    wins="accelerate stops: Invalid mixed precision policy",
                )
