"""Token-weighted evaluation: the loss of all supervised tokens divided by their number, independent of the batch size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...data.rows import Row, row_lengths
from ...distributed.world import ALONE, World
from ...training.task import Evaluation
from ...training.undisturbed import evaluation_mode
from .batches import collate
from .loss import batch_loss_sum


def evaluate(
    model: nn.Module, rows: Sequence[Row], *, batch_size: int, pad_id: int, device: torch.device, loss_dtype: str = "fp32",
    world: World = ALONE,
) -> Evaluation:  # fmt: skip
    """Rows are taken by length, so that little is padding; sums are kept in fp64; `weight` of the result is their supervised tokens.

    The processes of `world` take the batches in turn. All make as many passes, since the forward of a sharded model is one of all
    processes: where the batches do not come out even, the last passes compute the first rows once more, and count nothing.
    """
    lengths = row_lengths(rows)
    by_length = sorted(range(len(rows)), key=lambda i: lengths[i])
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    with evaluation_mode(model):
        for turn in range(0, len(by_length), world.size * batch_size):
            start = turn + world.rank * batch_size
            chosen = [rows[i] for i in by_length[start : start + batch_size] or by_length[:1]]
            batch = collate(chosen, pad_id=pad_id, device_type=device.type).to(device)
            loss = batch_loss_sum(model, batch, dtype=loss_dtype).double().cpu()
            if start < len(by_length):
                total += loss
                tokens += batch.supervised
    summed, counted = world.sum([float(total), tokens])
    return Evaluation(summed / max(1, counted), int(counted))
