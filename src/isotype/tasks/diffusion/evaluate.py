"""Evaluation at fixed noise levels with fixed noise: the same draws in every evaluation and in every run of the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...distributed.world import ALONE, World
from ...training.task import Evaluation
from ...training.undisturbed import evaluation_mode
from .batches import Batch, Row
from .noise_levels import fixed_levels, part_name
from .windows import Size

Drawn = tuple[int, Row, float]


def evaluate(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    draws: int,
    batch_size: int,
    device: torch.device,
    batch_of: Callable[[Sequence[Drawn]], Batch],
    losses: Callable[[nn.Module, Batch], Tensor],
    world: World = ALONE,
) -> Evaluation:
    """Mean loss over `draws` noise levels of each row, and by part of [0, 1000]; sums are kept in fp64.

    batch_of  makes a batch of (number of the draw, row, noise level), rows of one size
    losses    float[N] of a batch, in its rows' order
    world     its processes take the batches in turn, and all return the same. All make as many passes, since the forward of a shared model
              is one of all processes: where the batches do not come out even, the last passes compute the first row once more, and count
              nothing
    """
    drawn = [(i * draws + k, row, level) for i, row in enumerate(rows) for k, level in enumerate(fixed_levels(draws))]
    passes = _of_one_size(drawn, most=batch_size)
    sums = {part_name(level, draws): 0.0 for level in fixed_levels(draws)}
    with evaluation_mode(model):
        for turn in range(0, len(passes), world.size):
            some = passes[turn + world.rank] if turn + world.rank < len(passes) else []
            found = losses(model, batch_of(some or drawn[:1]).to(device)).double().tolist()
            for (_, _, level), loss in zip(some, found):
                sums[part_name(level, draws)] += loss
    sums = dict(zip(sums, world.sum(list(sums.values()))))
    count = max(1, len(rows))
    return Evaluation(sum(sums.values()) / (count * draws), len(rows), {name: total / count for name, total in sums.items()})


def _of_one_size(drawn: Sequence[Drawn], *, most: int) -> list[list[Drawn]]:
    """Passes of at most so many rows."""
    by_size: dict[Size, list[Drawn]] = {}
    for one in drawn:
        by_size.setdefault(one[1].size, []).append(one)
    return [same[i : i + most] for _, same in sorted(by_size.items()) for i in range(0, len(same), most)]
