"""The loss of a batch, a mean over each picture, summed over pictures."""

from __future__ import annotations

from torch import Tensor, nn

from ...dtypes import to_torch
from .batches import Batch
from .families import Asked, Family
from .objective import Objective


def picture_losses(model: nn.Module, family: Family, objective: Objective, batch: Batch, asked: Asked, *, dtype: str) -> Tensor:
    """Squared error of what the denoiser predicts, averaged over each picture's latent pixels, times the objective's weight.

    ->      float[N]  in `dtype`, `precision.loss`
    inside  the denoiser under the model's precision; the difference, its square and the mean in `dtype`
    """
    noisy, target = objective.mixed(batch.latents, batch.noise, batch.sigma)
    predicted = family.predict(model, noisy, objective.time(batch.sigma), batch.text, asked)
    wide = to_torch(dtype)
    losses = (predicted.to(wide) - target.to(wide)).square().flatten(1).mean(1)
    weights = objective.weights(batch.sigma)
    return losses if weights is None else losses * weights.to(wide)
