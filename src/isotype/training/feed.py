"""An endless feed of training rows, in an order that depends only on the seed. Its position is one integer, so that resuming is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..data.rows import Share
from .task import Feed

RowType = TypeVar("RowType")


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of one epoch. It depends only on seed and epoch, not on the global random state."""
    if not shuffle:
        return list(range(rows))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()


def mixed_order(shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of one epoch of weighted sources. It has as many rows as all sources together, shared out by weight.

    Each source continues where it stopped in the last epoch, and is shuffled again after each pass over its rows. The order of the sources
    is random, or evenly spread without shuffling.
    """
    quotas = _quotas(shares)
    queues = []
    offset = 0
    for k, (share, quota) in enumerate(zip(shares, quotas)):
        begin = epoch * quota
        passes = {
            n: epoch_order(share.rows, seed=seed * 1009 + k + 1, epoch=n, shuffle=shuffle)
            for n in range(begin // share.rows, (begin + quota - 1) // share.rows + 1)
        }
        queues.append(iter([offset + passes[at // share.rows][at % share.rows] for at in range(begin, begin + quota)]))
        offset += share.rows
    if shuffle:
        turns = [k for k, quota in enumerate(quotas) for _ in range(quota)]
        turns = [turns[i] for i in epoch_order(len(turns), seed=seed, epoch=epoch, shuffle=True)]
    else:
        turns = [k for _, k in sorted(((i + 0.5) / quota, k) for k, quota in enumerate(quotas) for i in range(quota))]
    return [next(queues[k]) for k in turns]


def _quotas(shares: Sequence[Share]) -> list[int]:
    """Rows of each source in an epoch. Shares are rounded down; the rows left over go to the sources with the largest remainders."""
    rows, weight = sum(s.rows for s in shares), sum(s.weight for s in shares)
    exact = [rows * s.weight / weight for s in shares]
    quotas = [int(q) for q in exact]
    for k in sorted(range(len(shares)), key=lambda k: quotas[k] - exact[k])[: rows - sum(quotas)]:
        quotas[k] += 1
    return quotas


class RowStream(Feed[RowType]):
    """A feed of rows that are all in memory or in the cache. `position` (rows handed out so far) is its whole state."""

    def __init__(self, rows: Sequence[RowType], *, seed: int, shuffle: bool, shares: Sequence[Share] = ()) -> None:
        self.rows, self.seed, self.shuffle, self.position, self.shares = rows, seed, shuffle, 0, shares
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[RowType]:
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.rows))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            taken.append(self.rows[self._order[index]])
            self.position += 1
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        if self.shares:
            return mixed_order(self.shares, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return epoch_order(len(self.rows), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    @property
    def epochs(self) -> float:
        return self.position / len(self.rows)

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        position = int(state["position"])
        if position < 0:
            raise ValueError(f"position {position} of the data")
        self.position = position
