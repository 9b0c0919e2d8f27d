"""The loss of a batch, a mean over each picture, summed over pictures."""

from __future__ import annotations

from torch import Tensor, nn

from ...dtypes import to_torch
from .batches import Batch
from .families import Asked, Family
from .objective import Objective


def picture_losses(model: nn.Module, family: Family, objective: Objective, batch: Batch, asked: Asked, *, dtype: str) -> Tensor:
    """Squared error of what the denoiser predicts, averaged over each picture's latent pixels (as far as its mask shows them), times the
    weights of the objective and of the picture.

    ->      float[N]  in `dtype`, `precision.loss`
    inside  the denoiser under the model's precision; the difference, its square and the mean in `dtype`
    """
    noisy, target = objective.mixed(batch.latents, batch.noise, batch.sigma)
    predicted = family.predict(model, noisy, objective.time(batch.sigma), batch.text, asked)
    wide = to_torch(dtype)
    losses_N = mean_of_pictures((predicted.to(wide) - target.to(wide)).square(), batch.mask)
    for weights_N in (objective.weights(batch.sigma), batch.weights):
        losses_N = losses_N if weights_N is None else losses_N * weights_N.to(wide)
    return losses_N


def mean_of_pictures(errors_NCHW: Tensor, mask_N1HW: Tensor | None) -> Tensor:
    """F[N]: the mean of each picture's errors, weighted by its mask."""
    if mask_N1HW is None:
        return errors_NCHW.flatten(1).mean(1)
    mask = mask_N1HW.to(errors_NCHW.dtype).expand_as(errors_NCHW)
    return (errors_NCHW * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)
