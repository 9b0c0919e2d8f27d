"""Which rows a step sees, and as what tensors. The position is one integer, so resuming at it is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.rows import IGNORED, LoadedData, Row, Share
from ..ops.attention import Documents

# Rows are padded to a multiple: half-precision products prefer aligned sizes. On a GPU cuDNN's attention also builds a plan for each new
# length, about 170 ms on an H100, so that there are few of them.
MULTIPLE, MULTIPLE_OF_SHORT_ROWS, MULTIPLE_ON_A_GPU = 8, 32, 128


def padded_length(longest: int, device_type: str) -> int:
    """Of a batch whose longest row has so many tokens."""
    short = longest <= MULTIPLE_ON_A_GPU
    multiple = MULTIPLE if device_type == "cpu" else MULTIPLE_OF_SHORT_ROWS if short else MULTIPLE_ON_A_GPU
    return longest + -longest % multiple


@dataclass(frozen=True)
class Batch:
    """What a model is given, and what a causal loss counts.

    input_ids, labels  int[B T]
    attention_mask     int[B T]  1 for real tokens; None where rows are packed
    tokens             real ones
    supervised         those that a causal loss counts
    position_ids       int[B T]  of packed rows, beginning at 0 in each document: transformers keeps documents apart by them
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor
    tokens: int
    supervised: int
    position_ids: Tensor | None = None
    counted: Tensor | None = None
    documents: Documents | None = None

    def to(self, device: torch.device) -> Batch:
        ids, mask, labels, positions, counted = (
            None if t is None else t.to(device, non_blocking=True)
            for t in (self.input_ids, self.attention_mask, self.labels, self.position_ids, self.counted)
        )
        documents = None if self.documents is None else self.documents.to(device)
        return replace(
            self, input_ids=ids, attention_mask=mask, labels=labels, position_ids=positions, counted=counted, documents=documents
        )  # fmt: skip

    @property
    def inputs(self) -> dict[str, Any]:
        """What a causal model's forward takes. No cache: with one, transformers would not look at the positions."""
        apart = {"attention_mask": self.attention_mask} if self.position_ids is None else {"position_ids": self.position_ids}
        return {"input_ids": self.input_ids, **apart, "use_cache": False}

    def as_one_row(self) -> Batch:
        """Packed rows one after the other, as varlen attention takes them. The first label of each is masked already."""
        assert self.position_ids is not None, "only packed rows may lie in one"
        ids, labels, positions = (t.reshape(1, -1) for t in (self.input_ids, self.labels, self.position_ids))
        return replace(self, input_ids=ids, attention_mask=None, labels=labels, position_ids=positions)


def collate(rows: Sequence[Row], *, pad_id: int, device_type: str = "cpu") -> Batch:
    """Pads on the right to the longest row, rounded up to the multiple that `device_type` wants; padding is never supervised.

    Rows of one document each get a mask. Where one is packed, all get positions instead, and padding is a document of its own.
    """
    longest = padded_length(max(len(row.input_ids) for row in rows), device_type)
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    packed = any(row.documents for row in rows)
    positions = torch.empty_like(mask) if packed else None
    lengths: list[int] = []
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n] = torch.tensor(row.input_ids, dtype=torch.long)
        labels[i, :n] = torch.tensor(row.labels, dtype=torch.long)
        mask[i, :n] = 1
        if positions is not None:
            labels[i, 0] = IGNORED
            parts = [*(row.documents or (n,)), longest - n]
            lengths += parts
            positions[i] = torch.cat([torch.arange(part) for part in parts])
    # the first label of a row predicts nothing: the loss looks at labels[1:]
    counted = (F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten() != IGNORED).nonzero().squeeze(-1)
    documents = Documents.of(lengths) if packed else None
    return Batch(input_ids, None if packed else mask, labels, int(mask.sum()), counted.numel(), positions, counted, documents)


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of one epoch: a function of seed and epoch alone, never of the random state."""
    if not shuffle:
        return list(range(rows))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()


def mixed_order(shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of one epoch of weighted sources: as many rows as there are, so many from each as its weight says.

    A source goes through its own rows, shuffled anew each time, from where the last epoch left it. Which source comes when is drawn, or,
    without shuffling, spread evenly.
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
    """Rows of each source in an epoch, in all as many as there are; what is left by rounding down goes to the largest remainders."""
    rows, weight = sum(s.rows for s in shares), sum(s.weight for s in shares)
    exact = [rows * s.weight / weight for s in shares]
    quotas = [int(q) for q in exact]
    for k in sorted(range(len(shares)), key=lambda k: quotas[k] - exact[k])[: rows - sum(quotas)]:
        quotas[k] += 1
    return quotas


class RowFeed(Protocol):
    """Training rows without end. `state` is all that makes it go on as if never stopped."""

    def take(self, count: int) -> list[Row]: ...

    @property
    def epochs(self) -> float: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class RowStream:
    """Rows that are all there, epoch after epoch. `position` (rows handed out so far) is its whole state."""

    def __init__(self, rows: Sequence[Row], *, seed: int, shuffle: bool, position: int = 0, shares: Sequence[Share] = ()) -> None:
        self.rows, self.seed, self.shuffle, self.position, self.shares = rows, seed, shuffle, position, shares
        self._epoch, self._order = -1, list[int]()

    def take(self, count: int) -> list[Row]:
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


def row_feed(data: LoadedData, *, seed: int, shuffle: bool) -> RowFeed:
    """The training rows of a run in the order it sees them."""
    if data.stream is not None:
        return data.stream
    return RowStream(data.train, seed=seed, shuffle=shuffle, shares=data.shares)
