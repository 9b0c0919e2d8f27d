"""Programs that cast to half what they keep, and bring it back: from an attribute, a list, a slot, an autograd function, as a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .program import program
from .tiny import MLP, tiny


class KeptForTheNextStep(MLP):
    """Adds what it kept in half in the step before. The cast stands on its own line."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.kept is not None:
            y = y + self.kept
        self.kept = y.detach().half()
        return y


class InAListForTheNextStep(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.kept:
            y = torch.add(y, self.kept[-1][0], alpha=0.1)
        self.kept.append((y.detach().half(),))
        return y


class MovedAndRead(MLP):
    """Copies its half into a slot before it reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        kept = torch.empty(2, *y.shape, dtype=torch.float16)
        kept[0], kept[1] = y.detach(), y.detach().half().cpu().clone()
        return torch.add(y, kept[1].transpose(0, 1).contiguous().transpose(0, 1), alpha=0.1)


class _SavesHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.half())
        return x.square()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * dy * x


class SavedForBackward(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_SavesHalf.apply(x))


class _GivesHalfAGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, unread: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class ReadByTheGradientAlone(MLP):
    """No operator reads the half of x, and its gradient passes through the cast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_GivesHalfAGradient.apply(x, x.half()))


KEPT: tuple[type[nn.Module], ...] = (
    KeptForTheNextStep, InAListForTheNextStep, MovedAndRead, SavedForBackward, ReadByTheGradientAlone,
)  # fmt: skip
for made in KEPT:
    for preset in ("fp32", "bf16-mixed"):
        program(f"{made.__name__}_in_{preset}", lambda made=made: tiny(mlp=made), preset=preset, steps=3)
