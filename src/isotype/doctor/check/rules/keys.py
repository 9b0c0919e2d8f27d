"""Rules about values that a tool refuses or reads differently than they look, and about versions with known dtype faults."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import deepspeed_setting, uses_deepspeed, uses_fsdp
from ..settings import Record, Setting, truth
from ..versions import NEWEST, outside, release
from .base import error, rule, warning

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
