"""Evaluation at fixed noise levels with fixed noise: the same draws in every evaluation and in every run of the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...distributed.world import ALONE, World
from ...training.task import Evaluation
from ...training.undisturbed import evaluation_mode
from .batches import Batch, MixedBatch, Row
from .noise_levels import fixed_levels, part_name

Drawn = tuple[int, Row, float]


def evaluate(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    draws: int,
    batch_size: int,
    device: torch.device,
    batch_of: Callable[[Sequence[Drawn]], Batch | MixedBatch],
    losses: Callable[[nn.Module, Batch | MixedBatch], Tensor],
    world: World = ALONE,
) -> Evaluation:
    """Mean loss over `draws` noise levels of each row, and by part of [0, 1000]; sums are kept in fp64.

    batch_of  makes a batch of (number of the draw, row, noise level)
    losses    float[N] of a batch, in its rows' order
    world     its processes take the batches in turn, and all return the same. All make as many passes, since the forward of a shared model
              is one of all processes: where the batches do not come out even, the last passes compute the first rows once more, and count
              nothing
    """
    drawn = [(i * draws + k, row, level) for i, row in enumerate(rows) for k, level in enumerate(fixed_levels(draws))]
    drawn.sort(key=lambda one: one[1].size)  # sorted, so that the rows of a pass have few sizes
    sums = {part_name(level, draws): 0.0 for level in fixed_levels(draws)}
    with evaluation_mode(model):
        for turn in range(0, len(drawn), world.size * batch_size):
            start = turn + world.rank * batch_size
            some = drawn[start : start + batch_size]
            found = losses(model, batch_of(some or drawn[:1]).to(device)).double().tolist()
            for (_, _, level), loss in zip(some, found):
                sums[part_name(level, draws)] += loss
    sums = dict(zip(sums, world.sum(list(sums.values()))))
    count = max(1, len(rows))
    return Evaluation(sum(sums.values()) / (count * draws), len(rows), {name: total / count for name, total in sums.items()})
