"""Logits of a trainer's own loss are deferred, whether or not its forward has labels: `compute_loss` of ORPO, of CPO, of a user.

What the loss makes of them without all logits (a gather, a logsumexp, a cross-entropy) is computed so; whatever else it reads is computed,
and counted with its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..optimize import deferring
from .methods import Methods


class Logits:
    """Wraps `compute_loss` of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.methods = Methods(trainer)

    def install(self) -> None:
        self.methods.wrap("compute_loss", self._compute_loss)

    def remove(self) -> None:
        self.methods.restore()

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with deferring(with_gradients=True):
            return original(*args, **kwargs)
