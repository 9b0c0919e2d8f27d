"""Packing: several rows in one of `max_length` tokens, so that a batch holds no padding.

Best fit, longest rows first: each goes where the least room is left. Rows of one source stay together, so that the weights of sources apply
to packed rows. What keeps the documents of a packed row apart is their positions, which begin at 0 in each
(`training.batches.collate`); nothing predicts the first token of each, so its label is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from .rows import IGNORED, Row, Share
from .tokens import TokenRows


class PackedRows(Sequence[Row]):
    """Packed rows over `rows`; `packs[i]` are the numbers of the rows in the i-th."""

    def __init__(self, rows: TokenRows, packs: Sequence[np.ndarray], capacity: int, of_block: Sequence[int]) -> None:
        self.rows, self.packs, self.capacity, self.of_block = rows, packs, capacity, of_block

    def __len__(self) -> int:
        return len(self.packs)

    @overload
    def __getitem__(self, i: int) -> Row: ...
    @overload
    def __getitem__(self, i: slice) -> PackedRows: ...
    def __getitem__(self, i: int | slice) -> Row | PackedRows:
        if isinstance(i, slice):
            return PackedRows(self.rows, self.packs[i], self.capacity, ())
        return joined([self.rows[int(k)] for k in self.packs[i]])

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths = self.rows.lengths
        return np.array([int(lengths[pack].sum()) for pack in self.packs], np.int64)

    def shares(self, shares: Sequence[Share]) -> list[Share]:
        """The shares of weighted sources, counted in packed rows."""
        return [Share(self.of_block.count(i), share.weight) for i, share in enumerate(shares)]

    def facts(self) -> dict[str, Any]:
        tokens, room = int(self.lengths.sum()), len(self) * self.capacity
        return {"rows": len(self.rows), "packed_rows": len(self), "filled": tokens / max(1, room), "length": self.capacity}


def pack(rows: TokenRows, capacity: int) -> PackedRows:
    """Packs the rows of each source by themselves."""
    packs: list[np.ndarray] = []
    of_block: list[int] = []
    for block in range(len(rows.blocks)):
        numbers = rows.of_block(block)
        found = best_fit(rows.lengths[numbers], capacity)
        packs += [numbers[pack] for pack in found]
        of_block += [block] * len(found)
    return PackedRows(rows, packs, capacity, of_block)


def best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Numbers of rows by pack; every row is in exactly one, no pack has more than `capacity` tokens."""
    packs: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # packs that have so much room left
    has_room = 0  # bit r: by_room[r] is not empty
    for i in np.argsort(-lengths, kind="stable").tolist():
        n = int(lengths[i])
        fitting = has_room >> n
        if fitting:
            room = n + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                has_room ^= 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(i)
        by_room[room - n].append(pack)
        has_room |= 1 << (room - n)
    return [np.array(sorted(pack), np.int64) for pack in packs]


def joined(rows: Sequence[Row]) -> Row:
    """Several rows as one, each document's first label masked."""
    ids = tuple(i for row in rows for i in row.input_ids)
    labels = tuple(label for row in rows for label in (IGNORED, *row.labels[1:]))
    first = next((k for k, label in enumerate(labels) if label != IGNORED), 0)
    return Row(ids, labels, first, tuple(len(row.input_ids) for row in rows))
