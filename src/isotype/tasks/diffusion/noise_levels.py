"""Which noise levels a picture is mixed with: their distribution in training, the fixed ones of an evaluation, and the shift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...config.schema import DiffusionSection


@dataclass(frozen=True)
class NoiseLevels:
    """shift  s in s t / (1 + (s - 1) t); 1 leaves levels as drawn"""

    timesteps: str
    shift: float

    def draw(self, generator: torch.Generator) -> float:
        """One level in (0, 1) of the training distribution, shifted. Uses one number of the generator."""
        if self.timesteps == "uniform":
            t = float(torch.rand((), generator=generator, dtype=torch.float64))
        else:
            t = float(torch.sigmoid(torch.randn((), generator=generator, dtype=torch.float64)))
        return self.shift * t / (1 + (self.shift - 1) * t)


def shift_of(section: DiffusionSection, scheduler: Mapping[str, Any], *, tokens: int) -> float:
    """The shift of a run with flow matching.

    scheduler  the content of scheduler_config.json: `shift` (`flow_shift` of DPMSolver), or with `use_dynamic_shifting` one that grows with
               the picture
    tokens     latent tokens of a training picture
    Source     diffusers' FlowMatchEulerDiscreteScheduler and `calculate_shift` of its Flux pipeline
    """
    if section.shift != "auto":
        return float(section.shift)
    if not scheduler.get("use_dynamic_shifting"):
        return float(scheduler.get("shift", scheduler.get("flow_shift", 1.0)))
    low, high = float(scheduler.get("base_image_seq_len", 256)), float(scheduler.get("max_image_seq_len", 4096))
    least, most = float(scheduler.get("base_shift", 0.5)), float(scheduler.get("max_shift", 1.15))
    mu = least + (most - least) * (tokens - low) / (high - low)
    return math.exp(mu) if scheduler.get("time_shift_type", "exponential") == "exponential" else mu


def fixed_levels(count: int) -> list[float]:
    """Levels in the middle of `count` equal parts of [0, 1]: those of every evaluation."""
    return [(k + 0.5) / count for k in range(count)]


def part_name(level: float, count: int) -> str:
    """The part of [0, 1000] that a fixed level stands for: `t250_500`."""
    k = int(level * count)
    return f"t{round(1000 * k / count)}_{round(1000 * (k + 1) / count)}"
