"""Computes the target that a denoiser is trained to predict, the loss, and the evaluation at fixed
noise levels.

With flow matching, a denoiser predicts the velocity. With a DDPM schedule, it predicts the noise or
v. The loss of a picture is a mean over its pixels, and the loss of a batch is the sum over its
pictures. An evaluation uses the same noise levels and the same noise in every run with the same
seed.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import DiffusionSection
from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...errors import UsageError
from ...training.task import Evaluation, eval_mode
from .batches import Batch, Row, group_by_shape
from .families import Conditioning, Family


@dataclass(frozen=True)
class NoiseLevels:
    """The distribution of the noise levels in training.

    distribution     `uniform`, `logit_normal` or `mode`
    shift            the number s in s t / (1 + (s - 1) t), for the run's largest pictures; with 1,
                     the levels are not changed
    mean, deviation  mean and standard deviation of the logit, for `logit_normal`
    mode_scale       the scale, for `mode`
    lowest, highest  the lowest and the highest noise level
    Source           Esser et al. 2024, 3.1, for `logit_normal` and `mode`
    """

    distribution: str
    shift: float
    mean: float = 0.0
    deviation: float = 1.0
    mode_scale: float = 1.29
    lowest: float = 0.0
    highest: float = 1.0

    def draw(self, generator: torch.Generator, shift: float) -> float:
        """Draws one noise level in (0, 1) from the training distribution, and shifts it. Each call
        takes one random number from the generator.
        """
        if self.distribution == "logit_normal":
            logit = self.mean + self.deviation * torch.randn(
                (), generator=generator, dtype=torch.float64
            )
            t = float(torch.sigmoid(logit))
        else:
            t = float(torch.rand((), generator=generator, dtype=torch.float64))
            if self.distribution == "mode":
                t = 1 - t - self.mode_scale * (math.cos(math.pi * t / 2) ** 2 - 1 + t)
        shifted = shift * t / (1 + (shift - 1) * t)
        return self.lowest + (self.highest - self.lowest) * shifted


def resolve_shift(section: DiffusionSection, scheduler: Mapping[str, Any], *, tokens: int) -> float:
    """Returns the shift of a run with flow matching.

    scheduler  the content of scheduler_config.json. The shift is its value `shift` (`flow_shift`
               for DPMSolver). If `use_dynamic_shifting` is set, larger pictures have a larger shift
    tokens     number of latent tokens of a training picture
    Source     diffusers' FlowMatchEulerDiscreteScheduler and `calculate_shift` of its Flux pipeline
    """
    if section.shift != "auto":
        return float(section.shift)
    if not scheduler.get("use_dynamic_shifting"):
        return float(scheduler.get("shift", scheduler.get("flow_shift", 1.0)))
    min_tokens = float(scheduler.get("base_image_seq_len", 256))
    max_tokens = float(scheduler.get("max_image_seq_len", 4096))
    min_shift = float(scheduler.get("base_shift", 0.5))
    max_shift = float(scheduler.get("max_shift", 1.15))
    mu = min_shift + (max_shift - min_shift) * (tokens - min_tokens) / (max_tokens - min_tokens)
    if scheduler.get("time_shift_type", "exponential") == "exponential":
        return math.exp(mu)
    return mu


FLOW_MATCHING = "flow_matching"
EPSILON = "epsilon"
V_PREDICTION = "v"
_OBJECTIVE_BY_PREDICTION = {
    "epsilon": EPSILON,
    "v_prediction": V_PREDICTION,
    "flow_prediction": FLOW_MATCHING,
}


class Objective(ABC):
    """Defines what a denoiser is trained to predict. A noise level is between 0 and 1. At level 0,
    the noisy latent is the latent itself.

    In shapes, N is the number of pictures, C is the number of latent channels, and H x W is the
    size of the latents.

    kind    `flow_matching`, `epsilon` or `v`
    levels  the distribution of a training picture's noise level
    """

    kind: str
    levels: NoiseLevels

    def draw(self, generator: torch.Generator, tokens: int | None = None) -> float:
        """Draws one noise level from the training distribution. Each call takes one random number
        from the generator.

        tokens  number of latent tokens of the picture; by default the number for the run's largest
                picture
        """
        return self.levels.draw(generator, self.levels.shift)

    @abstractmethod
    def mix(
        self, latents_NCHW: Tensor, noise_NCHW: Tensor, level_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the noisy latents and the target. Both are F[N C H W] in the latents' dtype."""

    @abstractmethod
    def time(self, level_N: Tensor) -> Tensor:
        """Returns the denoiser's time input. For flow matching, it is F[N] with values in [0, 1].
        Otherwise it is int64[N], the number of the step in the schedule.
        """

    def weights(self, level_N: Tensor) -> Tensor | None:
        """Returns the factor of each picture's loss, fp32[N]. Returns None if all factors are 1."""
        return None

    def __str__(self) -> str:
        levels = self.levels
        if (levels.lowest, levels.highest) == (0.0, 1.0):
            bounds = ""
        else:
            bounds = f" from {levels.lowest:g} to {levels.highest:g}"
        form = {
            "logit_normal": (
                ""
                if (levels.mean, levels.deviation) == (0.0, 1.0)
                else f" ({levels.mean:g}, {levels.deviation:g})"
            ),
            "mode": f" {levels.mode_scale:g}",
        }.get(levels.distribution, "")
        return f"{self.kind}, noise levels {levels.distribution}{form}{bounds}"


@dataclass(frozen=True)
class FlowMatching(Objective):
    """Flow matching. The noisy latent is a point on the straight line from a latent to noise. The
    target is the velocity along this line.

    levels    the distribution from which noise levels are drawn
    shift_at  a function that computes the shift of a picture from its number of latent tokens; None
              if the shift is the same for all pictures
    Source    Lipman et al. 2023. Level 0 is the picture and level 1 is noise, as in diffusers'
              FlowMatchEulerDiscreteScheduler
    """

    levels: NoiseLevels
    shift_at: Callable[[int], float] | None = None
    kind: str = field(default=FLOW_MATCHING, init=False)

    def draw(self, generator: torch.Generator, tokens: int | None = None) -> float:
        return self.levels.draw(
            generator,
            self.levels.shift if tokens is None or self.shift_at is None else self.shift_at(tokens),
        )

    def mix(
        self, latents_NCHW: Tensor, noise_NCHW: Tensor, level_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        sigma = _per_picture(level_N, latents_NCHW)
        return (1 - sigma) * latents_NCHW + sigma * noise_NCHW, noise_NCHW - latents_NCHW

    def time(self, level_N: Tensor) -> Tensor:
        return level_N

    def __str__(self) -> str:
        return f"{super().__str__()}, shift {self.levels.shift:.4g}"


@dataclass(frozen=True)
class Ddpm(Objective):
    """A DDPM schedule. At step t of the schedule, the noisy latent is signal_t * latent + spread_t
    * noise. The denoiser predicts the noise (epsilon), or v = signal_t * noise - spread_t * latent.

    kind            what the denoiser predicts: EPSILON or V_PREDICTION
    levels          the distribution from which steps of the schedule are drawn
    signal, spread  fp32[T]  sqrt(a_t) and sqrt(1 - a_t); a_t are the cumulative products of the
                    schedule
    factors         fp32[T]  the factor of the loss at step t; None if all are 1
    Source          Ho et al. 2020; v: Salimans and Ho 2022
    """

    kind: str
    levels: NoiseLevels
    signal: Tensor
    spread: Tensor
    factors: Tensor | None = None

    def draw(self, generator: torch.Generator, tokens: int | None = None) -> float:
        steps = len(self.signal)
        return min(steps - 1, int(super().draw(generator) * steps)) / steps

    def mix(
        self, latents_NCHW: Tensor, noise_NCHW: Tensor, level_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = (
            self._look_up(level_N, table).to(latents_NCHW.dtype)
            for table in (self.signal, self.spread)
        )
        signal, spread = (_per_picture(part, latents_NCHW) for part in parts)
        noisy = signal * latents_NCHW + spread * noise_NCHW
        return noisy, (
            noise_NCHW if self.kind == EPSILON else signal * noise_NCHW - spread * latents_NCHW
        )

    def time(self, level_N: Tensor) -> Tensor:
        return (level_N.float() * len(self.signal)).round().long().clamp(0, len(self.signal) - 1)

    def weights(self, level_N: Tensor) -> Tensor | None:
        if self.factors is None:
            return None
        return self._look_up(level_N, self.factors)

    def _look_up(self, level_N: Tensor, table_T: Tensor) -> Tensor:
        return table_T.to(level_N.device)[self.time(level_N)]

    def __str__(self) -> str:
        weighting = "" if self.factors is None else ", weighted by min-SNR"
        ending = ", zero terminal SNR" if not self.signal[-1] else ""
        return f"{super().__str__()} over {len(self.signal)} steps{ending}{weighting}"


def min_snr(snr_T: Tensor, gamma: float, *, kind: str) -> Tensor:
    """Returns the min-SNR factor of a loss. It is min(SNR, gamma) / SNR for epsilon, and min(SNR,
    gamma) / (SNR + 1) for v. With these two factors, an error of the predicted latent has the same
    weight for epsilon as for v.

    Source  Hang et al. 2023
    """
    if kind == EPSILON:  # it is 1 where the SNR is 0
        return torch.where(snr_T <= gamma, torch.ones_like(snr_T), gamma / snr_T)
    return snr_T.clamp(max=gamma) / (snr_T + 1)


def declared_objective(scheduler: Mapping[str, Any]) -> str | None:
    """Returns the objective that scheduler_config.json declares. Returns None if the objective is
    unknown.
    """
    if "FlowMatch" in str(scheduler.get("_class_name")):
        return FLOW_MATCHING
    return _OBJECTIVE_BY_PREDICTION.get(str(scheduler.get("prediction_type", "epsilon")))


def build_objective(
    section: DiffusionSection,
    scheduler: Mapping[str, Any],
    *,
    supported: tuple[str, ...],
    tokens: int,
) -> Objective:
    """Builds the objective of a run.

    scheduler  the content of scheduler_config.json
    supported  the objectives that the model family supports
    tokens     number of latent tokens of the largest training picture
    Raises     UsageError if the file declares another objective than the configuration, or if a key
               would have no effect
    """
    kind = declared_objective(scheduler)
    if kind not in supported:
        declaration = scheduler.get("prediction_type", scheduler.get("_class_name"))
        raise UsageError(
            f"scheduler_config.json declares {declaration}, and this model family is trained with"
            f" {' or '.join(supported)}"
        )
    if section.objective not in ("auto", kind):
        raise UsageError(
            f"diffusion.objective: {section.objective}, but scheduler_config.json declares {kind},"
            " which sampling would use",
            fix="diffusion.objective: auto, or change prediction_type in the scheduler's file",
        )
    is_flow = kind == FLOW_MATCHING
    if is_flow and section.weighting != "none":
        raise UsageError(
            f"diffusion.weighting: {section.weighting} is not defined for flow matching",
            fix="diffusion.timesteps: logit_normal",
        )
    if not is_flow and section.shift != "auto":
        raise UsageError(
            f"diffusion.shift: {section.shift} has no effect with {kind}",
            fix="remove diffusion.shift",
        )
    if section.timesteps != "auto":
        timesteps = section.timesteps
    elif is_flow:
        timesteps = "logit_normal"
    else:
        timesteps = "uniform"
    _check_settings(section, timesteps, is_flow=is_flow)
    shift = resolve_shift(section, scheduler, tokens=tokens) if is_flow else 1.0
    levels = NoiseLevels(
        timesteps,
        shift,
        section.logit_mean,
        section.logit_std,
        section.mode_scale,
        section.least_noise,
        section.most_noise,
    )
    if is_flow:
        return FlowMatching(levels, lambda tokens: resolve_shift(section, scheduler, tokens=tokens))
    from diffusers import DDPMScheduler

    schedule: Any = DDPMScheduler.from_config(dict(scheduler))
    alphas_T: Tensor = schedule.alphas_cumprod.double()
    is_weighted = section.weighting == "min_snr"
    if is_weighted:
        factors = min_snr(alphas_T / (1 - alphas_T), section.snr_gamma, kind=kind).float()
    else:
        factors = None
    return Ddpm(kind, levels, alphas_T.sqrt().float(), (1 - alphas_T).sqrt().float(), factors)


def _check_settings(section: DiffusionSection, timesteps: str, *, is_flow: bool) -> None:
    """Raises UsageError if a setting has no effect because of the other settings."""
    default = DiffusionSection()
    for key, requirement, is_met in (
        ("logit_mean", "timesteps: logit_normal", timesteps == "logit_normal"),
        ("logit_std", "timesteps: logit_normal", timesteps == "logit_normal"),
        ("mode_scale", "timesteps: mode", timesteps == "mode"),
        ("huber_c", "loss: huber", section.loss == "huber"),
        ("noise_offset", "epsilon or v as the objective", not is_flow),
    ):
        if getattr(section, key) != getattr(default, key) and not is_met:
            raise UsageError(
                f"diffusion.{key}: has no effect without {requirement}",
                fix=f"remove diffusion.{key}",
            )
    if section.least_noise >= section.most_noise:
        raise UsageError(
            f"diffusion.least_noise: {section.least_noise:g} is not below diffusion.most_noise:"
            f" {section.most_noise:g}"
        )


def _per_picture(values_N: Tensor, like: Tensor) -> Tensor:
    return values_N.reshape(-1, *[1] * (like.ndim - 1))


def picture_losses(
    model: nn.Module,
    family: Family,
    objective: Objective,
    batch: Batch,
    conditioning: Conditioning,
    *,
    dtype: str,
    huber_c: float | None = None,
) -> Tensor:
    """Returns the loss of each picture. This is the squared error of the denoiser's prediction,
    averaged over the latent pixels with the picture's mask as weights. It is multiplied by the
    weights of the objective and of the picture.

    huber_c  the parameter c of the smooth error, which is used in place of the squared error
    ->       float[N]  in `dtype`, `precision.loss`
    inside   the denoiser computes under the model's precision; the difference, its square and the
             mean are computed in `dtype`
    """
    noisy, target = objective.mix(batch.latents, batch.noise, batch.sigma)
    prediction = family.predict(model, noisy, objective.time(batch.sigma), batch.text, conditioning)
    loss_dtype = to_torch(dtype)
    errors = (prediction.to(loss_dtype) - target.to(loss_dtype)).square()
    if huber_c is not None:
        errors = 2 * huber_c * ((errors + huber_c**2).sqrt() - huber_c)
    losses_N = mean_of_pictures(errors, batch.mask)
    for weights_N in (objective.weights(batch.sigma), batch.weights):
        losses_N = losses_N if weights_N is None else losses_N * weights_N.to(loss_dtype)
    return losses_N


def mean_of_pictures(errors_NCHW: Tensor, mask_N1HW: Tensor | None) -> Tensor:
    """Returns the mean of each picture's errors, weighted by its mask, F[N]."""
    if mask_N1HW is None:
        return errors_NCHW.flatten(1).mean(1)
    mask = mask_N1HW.to(errors_NCHW.dtype).expand_as(errors_NCHW)
    return (errors_NCHW * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)


EvaluationDraw = tuple[int, Row, float]  # (number of the draw, row, noise level)


def evaluate(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    draws: int,
    batch_size: int,
    device: torch.device,
    build_batch: Callable[[Sequence[EvaluationDraw]], Batch],
    losses: Callable[[nn.Module, Batch], Tensor],
    noise_range: tuple[float, float] = (0.0, 1.0),
    world: World = ALONE,
) -> Evaluation:
    """Returns the mean loss of the rows. Each row is evaluated at `draws` noise levels. The
    interval `noise_range` is divided into `draws` equal parts, and the levels are the middles of these
    parts. The loss of each part is returned too, with a name such as `t250_500`. Sums are computed
    in fp64.

    build_batch  a function that makes a batch from tuples (number of the draw, row, noise level);
                 all rows of a batch have the same shape
    losses       a function that computes the loss of each row of a batch, float[N]
    world        the processes that share the work. Each process computes a part of the batches, and
                 all processes return the same result. All processes make the same number of forward
                 passes, because they run the forward of a shared model together. If a process has
                 no batch left, it computes the first row again, and this loss is not counted.
    """
    lowest, highest = noise_range
    edges = [lowest + (highest - lowest) * k / draws for k in range(draws + 1)]
    levels = [lowest + (highest - lowest) * ((k + 0.5) / draws) for k in range(draws)]
    parts = [
        f"t{round(1000 * low)}_{round(1000 * high)}" for low, high in itertools.pairwise(edges)
    ]
    all_draws = [
        (i * draws + k, row, levels[k]) for i, row in enumerate(rows) for k in range(draws)
    ]
    shapes = sorted(group_by_shape(all_draws, lambda draw: draw[1]).items())
    passes = [
        group[i : i + batch_size] for _, group in shapes for i in range(0, len(group), batch_size)
    ]
    sums = dict.fromkeys(parts, 0.0)
    with eval_mode(model):
        for turn in range(0, len(passes), world.size):
            local_draws = passes[turn + world.rank] if turn + world.rank < len(passes) else []
            batch_losses = (
                losses(model, build_batch(local_draws or all_draws[:1]).to(device))
                .double()
                .tolist()
            )
            for (number, *_), loss in zip(local_draws, batch_losses):
                sums[parts[number % draws]] += loss
    sums = dict(zip(sums, world.sum(list(sums.values()))))
    count = max(1, len(rows))
    return Evaluation(
        sum(sums.values()) / (count * draws),
        len(rows),
        {name: total / count for name, total in sums.items()},
    )
