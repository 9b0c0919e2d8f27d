"""How often a weight has changed: by PyTorch's version counter, and by optimizers' steps, since fused optimizers do not change the
counter."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

_steps: Any = WeakIdKeyDictionary()  # of weights that were asked about


def change_count(weight: Tensor) -> tuple[int, int]:
    """(version, optimizer steps since the first question)."""
    _watch()
    return 0 if weight.is_inference() else weight._version, _steps.setdefault(weight, 0)


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight in _steps:
                _steps[weight] += 1
