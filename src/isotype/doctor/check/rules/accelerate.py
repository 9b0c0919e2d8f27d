"""Rules about accelerate's own configuration and its Accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from ....finding import Finding
from ..model_settings import launcher_mode
from ..record import Record
from .base import error, rule, warning


@rule("CF047")
def two_accelerators(r: Record) -> Iterator[Finding]:
    """Two Accelerators of different mixed precision in one process

    **Why it matters.** The state is shared: "AcceleratorState has already been initialized and cannot be changed".

    **Example.** `Accelerator(mixed_precision="bf16")`, later `Accelerator(mixed_precision="fp16")`.

    **What to do.** One Accelerator, or `AcceleratorState._reset_state()` between.
    """
    first, second = r.facts.get("code.accelerators.0"), r.facts.get("code.accelerators.1")
    if first and second:
        yield error(
            f"Accelerator is made with mixed_precision {first.value} and {second.value}",
            second,
            first,
            cause="AcceleratorState is shared in a process and cannot be changed",
            fix="one Accelerator, or AcceleratorState._reset_state() between them",
            wins="the first; the second raises",
        )


@rule("CF058")
def without_effect_in_accelerate(r: Record) -> Iterator[Finding]:
    """accelerate settings without effect

    **Why it matters.** `downcast_bf16` is for TPUs only; a legacy `fp16:` key is deleted when `mixed_precision` is there.

    **Example.** `downcast_bf16: 'yes'` with `distributed_type: MULTI_GPU`.

    **What to do.** Remove them.
    """
    f = r.facts
    downcast = f.on("accelerate.downcast_bf16")
    if downcast is not None and f.word("accelerate.distributed_type") not in ("tpu", "xla"):
        yield warning(
            "downcast_bf16 has no effect here",
            downcast,
            f.get("accelerate.distributed_type"),
            cause="downcast_bf16 is read on TPUs only",
            fix="downcast_bf16: 'no'",
            wins="nothing is downcast",
        )
    legacy, mixed = f.given("accelerate.fp16"), f.get("accelerate.mixed_precision")
    if legacy is not None and mixed is not None:
        yield warning(
            "the legacy key fp16 is dropped",
            legacy,
            mixed,
            cause="with mixed_precision present accelerate deletes the old fp16 key",
            fix="remove fp16",
            wins=f"mixed_precision: {mixed.value}",
        )


@rule("CF059")
def fp8_without_a_library(r: Record) -> Iterator[Finding]:
    """fp8 and no library for it

    **Why it matters.** accelerate needs TransformerEngine, torchao or MS-AMP: "Using `fp8` precision requires
    `transformer_engine` or `MS-AMP`".

    **Example.** `mixed_precision: fp8`, and none of them in requirements.txt.

    **What to do.** Install one, or bf16.
    """
    launcher = launcher_mode(r.facts)
    versions = r.facts.tool("versions")
    if launcher is None or str(launcher.value).lower() != "fp8" or versions is None:
        return
    if not {"transformer-engine", "transformer_engine", "torchao", "msamp", "ms-amp"} & set(versions.attributes.get("names", ())):
        yield error(
            "fp8 without TransformerEngine, torchao or MS-AMP",
            launcher,
            cause=f"{versions.file} lists none of the libraries that fp8 needs",
            fix="pip install transformer-engine[pytorch] (or torchao), or mixed_precision: bf16",
            wins="accelerate stops",
        )
