"""Rules about pinned or installed versions with known dtype faults."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..record import Record
from ..sharded import deepspeed_setting, uses_deepspeed, uses_fsdp
from ..versions import release
from .base import error, rule, warning


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
