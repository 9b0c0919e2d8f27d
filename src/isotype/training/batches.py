"""Which rows a step sees, and as what tensors. The position is one integer, so resuming at it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.rows import IGNORED, Row

MULTIPLE = 8  # rows are padded to it: half-precision products prefer aligned sizes


@dataclass(frozen=True)
class Batch:
    """input_ids, attention_mask, labels  int[B T]; tokens: real ones; supervised: those that a causal loss counts."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int
    supervised: int

    def to(self, device: torch.device) -> Batch:
        ids, mask, labels = (t.to(device, non_blocking=True) for t in (self.input_ids, self.attention_mask, self.labels))
        return Batch(ids, mask, labels, self.tokens, self.supervised)


def collate(rows: Sequence[Row], *, pad_id: int) -> Batch:
    """Pads on the right to the longest row, rounded up to a multiple of 8; padding is masked and never supervised."""
    longest = max(len(row.input_ids) for row in rows)
    longest += -longest % MULTIPLE
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n] = torch.tensor(row.input_ids, dtype=torch.long)
        labels[i, :n] = torch.tensor(row.labels, dtype=torch.long)
        mask[i, :n] = 1
    # the first label of a row predicts nothing: the loss looks at labels[1:]
    return Batch(input_ids, mask, labels, int(mask.sum()), int((labels[:, 1:] != IGNORED).sum()))


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of one epoch: a function of seed and epoch alone, never of the random state."""
    if not shuffle:
        return list(range(rows))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()


class RowStream:
    """Rows without end, epoch after epoch. `position` (rows handed out so far) is its whole state."""

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool, position: int = 0) -> None:
        self.rows, self.seed, self.shuffle, self.position = rows, seed, shuffle, position
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[Row]:
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.rows))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, epoch_order(len(self.rows), seed=self.seed, epoch=epoch, shuffle=self.shuffle)
            taken.append(self.rows[self._order[index]])
            self.position += 1
        return taken

    @property
    def epochs(self) -> float:
        return self.position / len(self.rows)
