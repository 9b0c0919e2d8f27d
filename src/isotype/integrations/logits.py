"""Logits of a trainer's own loss are deferred, whether or not its forward has labels: `compute_loss` of ORPO, of CPO, of a user.

Samples that a step trains on (GRPO, OnlineDPO) draw from training's generators.

Operations that do not need all logits (a gather, a logsumexp, a cross-entropy) are computed without them. For any other operation the
logits are computed, and counted with the line that needed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..optimize import deferring
from ..optimize.generation import from_training
from .methods import Methods


class Logits:
    """Wraps `training_step` and `compute_loss` of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.methods = Methods(trainer)

    def install(self) -> None:
        self.methods.wrap("training_step", self._training_step)
        self.methods.wrap("compute_loss", self._compute_loss)

    def remove(self) -> None:
        self.methods.restore()

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with from_training():
            return original(*args, **kwargs)

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with deferring(with_gradients=True):
            return original(*args, **kwargs)
