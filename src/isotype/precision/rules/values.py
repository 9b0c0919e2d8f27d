"""Rules about values that need fp32 whatever the dtype of products: losses, norms, noise levels, latents."""

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
