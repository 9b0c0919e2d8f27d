"""Rules about dtypes that a device lacks."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Finding
from .rule import Facts, finding, rule


@rule("PR001")
def bf16_without_hardware(f: Facts) -> Iterator[Finding]:
    """bf16 was asked for on a device that has none

    **Why it matters.** GPUs before Ampere (compute capability 8.0) emulate bf16 or refuse it, several times slower than fp32. Many
    trainers replace it with fp16 in silence, and fp16 overflows where bf16 does not.

    **Example.** `preset: bf16-lora` on a T4.

    **What to do.** `preset: fp16-mixed` (fast, with loss scaling; activations above 65504 overflow) or `preset: fp32` (slow, safe).
    """
    asked = [role for role in ("compute", "base", "trainable", "generate") if f.value(role) == "bf16"]
    if asked and f.bf16 == "none":
        yield finding(
            f, tuple(asked), f"bf16 was asked for, and {f.device} has no bf16",
            cause="bf16 needs compute capability 8.0 (Ampere), CDNA, or a CPU",
            fix="precision.preset: fp16-mixed (fast, may overflow), or precision.preset: fp32 (slow, safe)",
        )  # fmt: skip


@rule("PR027")
def bf16_parts_without_hardware(f: Facts) -> Iterator[Finding]:
    """bf16 or fp16 for a part of a diffusion pipeline on a device without it

    **Why it matters.** A VAE or text encoder in bf16 on a GPU without bf16 is emulated or refused.

    **Example.** `precision.text_encoder: bf16` on a T4.

    **What to do.** `fp32`, or `fp16` for the text encoders.
    """
    asked = [role for role in ("vae", "text_encoder") if role in f.settings and f.value(role) == "bf16"]
    if asked and f.bf16 == "none":
        yield finding(
            f, tuple(asked), f"bf16 was asked for, and {f.device} has no bf16",
            cause="bf16 needs compute capability 8.0 (Ampere), CDNA, or a CPU",
            fix=f"precision.{asked[0]}: fp32",
        )  # fmt: skip
