"""Keeps the noise level exact in denoisers that round it to the dtype of their hidden states.

Flux computes `timestep.to(hidden_states.dtype) * 1000`: in bf16 1000 noise levels become 498, up to 3.5 of 1000 off. The instance's forward
records the exact level, and the sinusoidal embedding uses it. No class is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...instance_method import InstanceMethod

_LEVELS = "_isotype_noise_levels"


class _Levels:
    """What one forward pass was given, in the order in which a denoiser embeds it; empty between passes."""

    def __init__(self, scale: float) -> None:
        self.scale, self.given = scale, list[Tensor]()


class _Exact:
    """Forward pre-hook of a sinusoidal embedding. An object, so that deepcopy and pickling keep it."""

    def __init__(self, levels: _Levels) -> None:
        self.levels = levels

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.levels.given:
            return None
        level = self.levels.given.pop(0)
        return (level.to(torch.float32) * self.levels.scale, *args[1:])


def keep_time_exact(denoiser: nn.Module, scale: float) -> None:
    """Makes the sinusoidal embeddings of `denoiser` take its `timestep` and `guidance` in fp32, times `scale`. Before `apply_precision`."""
    levels = _Levels(scale)
    denoiser.__dict__[_LEVELS] = levels
    InstanceMethod(_forward, denoiser).put()
    for module in embeddings_of_time(denoiser):
        module.register_forward_pre_hook(_Exact(levels))


def embeddings_of_time(model: nn.Module) -> list[nn.Module]:
    """The sinusoidal embeddings of a denoiser."""
    from diffusers.models.embeddings import Timesteps

    return [module for module in model.modules() if isinstance(module, Timesteps)]


def _forward(denoiser: nn.Module, *args: Any, **kwargs: Any) -> Any:
    levels: _Levels = getattr(denoiser, _LEVELS)
    levels.given = [kwargs[name] for name in ("timestep", "guidance") if kwargs.get(name) is not None]
    try:
        return type(denoiser).forward(denoiser, *args, **kwargs)
    finally:
        levels.given = []
