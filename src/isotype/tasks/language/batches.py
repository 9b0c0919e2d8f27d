"""What a causal language model is given: rows of tokens, padded or packed, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.rows import IGNORED, LoadedData, Row
from ...training.feed import Feed, RowStream

MULTIPLE = 8  # rows are padded to it: half-precision products prefer aligned sizes


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

    @property
    def rows(self) -> int:
        return len(self.input_ids)

    @property
    def weight(self) -> int:
        return self.supervised

    @property
    def units(self) -> int:
        return self.tokens

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.input_ids.shape[1]} tokens"

    def to(self, device: torch.device) -> Batch:
        ids, mask, labels, positions = (
            None if t is None else t.to(device, non_blocking=True)
            for t in (self.input_ids, self.attention_mask, self.labels, self.position_ids)
        )
        return Batch(ids, mask, labels, self.tokens, self.supervised, positions)  # type: ignore[arg-type]  # the first is never None

    @property
    def inputs(self) -> dict[str, Any]:
        """What a causal model's forward takes. No cache: with one, transformers would not look at the positions."""
        apart = {"attention_mask": self.attention_mask} if self.position_ids is None else {"position_ids": self.position_ids}
        return {"input_ids": self.input_ids, **apart, "use_cache": False}

    def as_one_row(self) -> Batch:
        """Packed rows one after the other, as varlen attention takes them. The first label of each is masked already."""
        assert self.position_ids is not None, "only packed rows may lie in one"
        ids, labels, positions = (t.reshape(1, -1) for t in (self.input_ids, self.labels, self.position_ids))
        return Batch(ids, None, labels, self.tokens, self.supervised, positions)


def collate(rows: Sequence[Row], *, pad_id: int) -> Batch:
    """Pads on the right to the longest row, rounded up to a multiple of 8; padding is never supervised.

    Rows of one document each get a mask. Where one is packed, all get positions instead, and padding is a document of its own.
    """
    longest = max(len(row.input_ids) for row in rows)
    longest += -longest % MULTIPLE
    input_ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), longest), IGNORED, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    packed = any(row.documents for row in rows)
    positions = torch.empty_like(mask) if packed else None
    for i, row in enumerate(rows):
        n = len(row.input_ids)
        input_ids[i, :n] = torch.tensor(row.input_ids, dtype=torch.long)
        labels[i, :n] = torch.tensor(row.labels, dtype=torch.long)
        mask[i, :n] = 1
        if positions is not None:
            labels[i, 0] = IGNORED
            parts = [*(row.documents or (n,)), longest - n]
            positions[i] = torch.cat([torch.arange(part) for part in parts])
    # the first label of a row predicts nothing: the loss looks at labels[1:]
    supervised = int((labels[:, 1:] != IGNORED).sum())
    return Batch(input_ids, None if packed else mask, labels, int(mask.sum()), supervised, positions)


def row_feed(data: LoadedData, *, seed: int, shuffle: bool) -> Feed[Row]:
    """The training rows of a run in the order it sees them."""
    if data.stream is not None:
        stream: Feed[Row] = data.stream
        return stream
    return RowStream(data.train, seed=seed, shuffle=shuffle, shares=data.shares)
