"""The flow-matching loss of a batch, a mean over each picture, summed over pictures."""

from __future__ import annotations

from torch import Tensor, nn

from ...dtypes import to_torch
from .batches import Batch
from .families import Family
from .noise_levels import mixed


def picture_losses(model: nn.Module, family: Family, batch: Batch, *, guidance: float, dtype: str) -> Tensor:
    """Squared error of the predicted velocity, averaged over each picture's latent pixels.

    ->      float[N]  in `dtype`, `precision.loss`
    inside  the denoiser under the model's precision; the difference, its square and the mean in `dtype`
    """
    noisy, target = mixed(batch.latents, batch.noise, batch.sigma)
    predicted = family.predict(model, noisy, batch.sigma, batch.text, guidance=guidance)
    wide = to_torch(dtype)
    return (predicted.to(wide) - target.to(wide)).square().flatten(1).mean(1)
