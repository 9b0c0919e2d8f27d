"""Rules about fp16, which needs loss scaling and fp32 weights, and does not mix with bf16."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Finding
from .rule import Facts, finding, rule


@rule("PR004")
def fp16_weights_trained(f: Facts) -> Iterator[Finding]:
    """Weights that are trained cannot be fp16

    **Why it matters.** Gradient scalers refuse fp16 gradients ("Attempting to unscale FP16 gradients"), and updates below 2^-11 of a
    weight vanish.

    **Example.** `trainable: fp16`.

    **What to do.** `trainable: fp32` (preset `fp16-mixed`).
    """
    if f.value("trainable") == "fp16":
        yield finding(
            f, ("trainable", "loss_scaling"), "weights that are trained cannot be fp16",
            cause="fp16 gradients cannot be unscaled without overflow, and small updates vanish in fp16 weights",
            fix="precision.trainable: fp32",
        )  # fmt: skip


@rule("PR005")
def fp16_without_loss_scaling(f: Facts) -> Iterator[Finding]:
    """fp16 products without loss scaling

    **Why it matters.** fp16 gradients below 6e-8 flush to zero: with a mean over 8192 tokens most of a head's gradient does.

    **Example.** `compute: fp16` with `loss_scaling: none`.

    **What to do.** `loss_scaling: dynamic`, or `compute: bf16`.
    """
    if f.value("compute") == "fp16" and f.value("loss_scaling") == "none":
        yield finding(
            f, ("compute", "loss_scaling"), "fp16 products need loss scaling",
            cause="fp16 gradients below 6e-8 become zero",
            fix="precision.loss_scaling: dynamic, or precision.preset: fp16-mixed",
        )  # fmt: skip


@rule("PR006")
def loss_scaling_without_fp16(f: Facts) -> Iterator[Finding]:
    """Loss scaling without fp16 does nothing but skip steps

    **Why it matters.** bf16 and fp32 have the same exponent range: nothing underflows, and a scaler can only hide a real overflow by
    skipping the step.

    **Example.** `compute: bf16` with `loss_scaling: dynamic`.

    **What to do.** Leave `loss_scaling` out.
    """
    if f.value("loss_scaling") == "dynamic" and f.value("compute") != "fp16":
        yield finding(
            f, ("loss_scaling", "compute"), f"loss scaling has no use with {f.value('compute')} products",
            cause=f"{f.value('compute')} has fp32's exponent range; a scaler would only hide a real overflow",
            fix="precision.loss_scaling: none, or precision.compute: fp16",
        )  # fmt: skip


@rule("PR009")
def two_half_formats(f: Facts) -> Iterator[Finding]:
    """bf16 and fp16 in one run

    **Why it matters.** fp16 cannot hold bf16's range and bf16 drops fp16's last three bits; each conversion between them loses one or
    the other, and torch promotes the mixture to fp32.

    **Example.** `base: fp16` with `compute: bf16`.

    **What to do.** One of them: `bf16` where the device has it.
    """
    roles = ("base", "trainable", "compute") if f.value("frozen") == "yes" else ("trainable", "compute")
    halves = {role: f.value(role) for role in roles if f.value(role) in ("bf16", "fp16")}
    if len(set(halves.values())) > 1:
        wanted = halves[next((role for role in halves if f[role].given), "compute")]
        others = [role for role, word in halves.items() if word != wanted]
        yield finding(
            f, tuple(halves), "bf16 and fp16 in one run",
            cause="each conversion between them loses range or precision, and torch promotes their mixture to fp32",
            fix=" and ".join(f"precision.{role}: {wanted}" for role in others),
        )  # fmt: skip
