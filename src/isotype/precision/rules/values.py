"""Rules about values that need fp32 whatever the dtype of products (losses, norms, noise levels, latents), about fp16, which needs loss
scaling and fp32 weights, and about dtypes that a device lacks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...dtypes import itemsize
from ...finding import Finding, Severity
from .rule import Facts, finding, rule


@rule("PR010")
def loss_in_low_precision(f: Facts) -> Iterator[Finding]:
    """The loss in low precision

    **Why it matters.** torch's bf16 cross-entropy keeps log-probabilities in bf16: single gradient elements are up to 5.9% off.

    **Example.** `loss: bf16`.

    **What to do.** `loss: fp32`.
    """
    if f.value("loss") != "fp32":
        yield finding(
            f, ("loss", "compute"), f"log-probabilities in {f.value('loss')}",
            cause="a softmax over a large vocabulary in low precision: gradient elements are several percent off",
            fix="precision.loss: fp32", severity=Severity.WARNING,
        )  # fmt: skip


@rule("PR014")
def norms_not_fp32(f: Facts) -> Iterator[Finding]:
    """Norms compute in fp32 inside

    **Why it matters.** The norms of transformers' models widen their input to fp32 whatever the settings say, and a sum of squares in bf16
    would be several percent off: a narrower `norms` would have no effect.

    **Example.** `norms: bf16`.

    **What to do.** Leave `norms` out. Their output is `compute` in any case.
    """
    if f.value("norms") != "fp32":
        yield finding(
            f, ("norms", "compute"), f"norms compute in fp32 inside; {f.value('norms')} would have no effect",
            cause="the models' own norms widen to fp32, and their sums need it; the output is `compute` in any case",
            fix="precision.norms: fp32",
        )  # fmt: skip


@rule("PR025")
def noise_levels_in_low_precision(f: Facts) -> Iterator[Finding]:
    """The noise level of a diffusion model in half precision

    **Why it matters.** bf16 has 8 significant bits: of 1000 noise levels 498 remain apart, and one is moved by up to 3.5. The model is then
    told another level than the one its picture was mixed with, in training and in every denoising step.

    **Example.** `precision.timesteps: bf16`.

    **What to do.** Leave `timesteps` at fp32; it is one number a picture.
    """
    if "timesteps" in f.settings and f.value("timesteps") != "fp32":
        yield finding(
            f, ("timesteps", "compute"), f"noise levels in {f.value('timesteps')}",
            cause="a model would be told another noise level than its picture has: up to 3.5 of 1000 off in bf16",
            fix="precision.timesteps: fp32",
        )  # fmt: skip


@rule("PR026")
def latents_narrower_than_the_loss(f: Facts) -> Iterator[Finding]:
    """Latents, noise and target narrower than the loss that compares them

    **Why it matters.** The noise level and the target would be rounded before the loss sees them: sigma is up to 1.94 of 1000 off in bf16,
    as in example scripts that cast it to the latents' dtype. A loss in fp32 cannot bring that back.

    **Example.** `precision.latents: bf16` with `loss: fp32`.

    **What to do.** Leave `latents` at fp32: a latent is small beside one activation.
    """
    if "latents" in f.settings and itemsize(f.value("latents")) < itemsize(f.value("loss")):
        yield finding(
            f, ("latents", "loss"), f"latents, noise and target in {f.value('latents')} under a loss in {f.value('loss')}",
            cause="noise level and target are rounded before the loss is computed",
            fix=f"precision.latents: {f.value('loss')}",
        )  # fmt: skip


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
