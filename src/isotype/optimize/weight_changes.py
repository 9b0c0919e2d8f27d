"""How often a weight has changed: by PyTorch's version counter, and by optimizers' steps, since fused optimizers do not change the
counter."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# id of a trained weight that was asked about -> steps. Not a weak reference: torch.utils.swap_tensors refuses a weight that has one. A new
# tensor may get the id of a dead one: its count then begins above 0, and only differences matter.
_steps: dict[int, int] = {}


def change_count(weight: Tensor) -> tuple[int, int]:
    """(version, optimizer steps since the first question)."""
    _watch()
    trained = weight.requires_grad and weight.is_leaf
    return 0 if weight.is_inference() else weight._version, _steps.setdefault(id(weight), 0) if trained else 0


@cache
def _watch() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if id(weight) in _steps:
                _steps[id(weight)] += 1
