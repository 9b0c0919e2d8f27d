"""Tokenised rows in flat arrays, in memory or mapped from a file; mapped rows need memory only
while they are used.

ids         int32[N]   tokens of all rows, one after the other
learnt      bool[N]    whether a token is learnt
ends        int64[R]   where each row ends in them
example     int64[R]   which of its source's rows it is, from 0; -1 for a window of plain text
cut         bool[R]    longer than data.max_length
wanted      bool[R]    the label of an answer; true where rows have none
supervised  int32[R]   tokens that give a loss
digest      uint64[R]  of the tokens: rows with the same one are the same row (64 bits: 1 pair in 40
            million among a million rows)
prompt      uint64[R]  of the tokens before the first learnt one; 0 where that is the first of all
pictures    uint8[P]   the references of all rows' pictures as UTF-8, a line each
pictures_end int64[R]  where those of each row end
"""

from __future__ import annotations

import hashlib
import io
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import IO, Any, TypeVar, overload

import numpy as np

from .rows import (
    IGNORED,
    Row,
    Share,
    is_picture_unchanged,
    picture_digest,
    picture_path,
    row_lengths,
)

T = TypeVar("T")
_CHUNK = 1 << 22  # tokens looked at at once
COLUMNS: Mapping[str, str] = {
    "ids": "int32", "learnt": "bool", "ends": "int64", "example": "int64", "cut": "bool", "wanted": "bool",
    "supervised": "int32", "digest": "uint64", "prompt": "uint64", "pictures": "uint8",
    "pictures_end": "int64",
}  # fmt: skip


class TokenBlock:
    """The rows of one source, with the counts made while reading (`facts`)."""

    def __init__(self, columns: Mapping[str, np.ndarray], facts: dict[str, Any]) -> None:
        self.ids = columns["ids"]
        self.learnt = columns["learnt"]
        self.ends = columns["ends"]
        self.example, self.cut, self.wanted, self.supervised = (
            columns[n] for n in ("example", "cut", "wanted", "supervised")
        )
        self.digest = columns["digest"]
        self.prompt = columns["prompt"]
        self.pictures = columns["pictures"]
        self.pictures_end = columns["pictures_end"]
        self.facts = facts

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def row(self, i: int) -> Row:
        start = int(self.ends[i - 1]) if i else 0
        end = int(self.ends[i])
        ids = self.ids[start:end]
        learnt = self.learnt[start:end]
        labels = np.where(learnt, ids, IGNORED)
        return Row(
            tuple(ids.tolist()),
            tuple(labels.tolist()),
            int(learnt.argmax()),
            pictures=self.references(i),
        )

    def references(self, i: int) -> tuple[str, ...]:
        """Of a row's pictures."""
        start = int(self.pictures_end[i - 1]) if i else 0
        end = int(self.pictures_end[i])
        if end > start:
            return tuple(self.pictures[start:end].tobytes().decode().splitlines())
        return ()

    def find_missing_picture(self) -> str | None:
        """The first picture that is no longer what was tokenised, or None."""
        every = self.pictures.tobytes().decode().splitlines() if len(self.pictures) else []
        return next(
            (
                str(picture_path(reference))
                for reference in every
                if not is_picture_unchanged(reference)
            ),
            None,
        )


def row_digest(input_ids: Sequence[int] | np.ndarray, pictures: Sequence[str]) -> int:
    """A 64-bit hash of the tokens of a row, and of its pictures."""
    ids = np.asarray(input_ids, np.int32)
    picture_digests = "".join(map(picture_digest, pictures)).encode()
    return int.from_bytes(
        hashlib.blake2b(ids.tobytes() + picture_digests, digest_size=8).digest(), "little"
    )


class TokenWriter:
    """Collects rows into the columns of a block: in memory, or in files that `opened` makes."""

    def __init__(self, files: Mapping[str, IO[bytes]] | None = None) -> None:
        if files is not None:
            self.files: Mapping[str, Any] = files
        else:
            self.files = {name: io.BytesIO() for name in COLUMNS}
        self.end = self.rows = self.pictures_end = 0

    def add(self, row: Row, *, example: int, cut: bool, is_wanted: bool = True) -> None:
        ids = np.asarray(row.input_ids, np.int32)
        learnt = np.asarray(row.labels, np.int64) != IGNORED
        prompt = ids[: learnt.argmax()]
        pictures = np.frombuffer(
            "".join(f"{reference}\n" for reference in row.pictures).encode(), np.uint8
        )
        self.end += len(ids)
        self.rows += 1
        self.pictures_end += len(pictures)
        values = {
            "ids": ids,
            "learnt": learnt,
            "ends": self.end,
            "example": example,
            "cut": cut,
            "wanted": is_wanted,
            "supervised": learnt[1:].sum(),
            "digest": row_digest(ids, row.pictures),
            "prompt": row_digest(prompt, row.pictures) if len(prompt) else 0,
            "pictures": pictures,
            "pictures_end": self.pictures_end,
        }
        for name, value in values.items():
            self.files[name].write(np.asarray(value, COLUMNS[name]).tobytes())

    def block(self, facts: dict[str, Any]) -> TokenBlock:
        """The rows collected in memory."""
        return TokenBlock(
            {
                name: np.frombuffer(self.files[name].getvalue(), dtype)
                for name, dtype in COLUMNS.items()
            },
            facts,
        )


class LazyRows(Sequence[T]):
    """Rows that are made one at a time, by `build_row`, when they are asked for; a slice is a `Selection`
    of them.
    """

    @abstractmethod
    def build_row(self, i: int) -> T: ...

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> Selection[T]: ...
    def __getitem__(self, i: int | slice) -> T | Selection[T]:
        if isinstance(i, slice):
            return Selection(self, range(len(self))[i])
        return self.build_row(i)


class Selection(LazyRows[T]):
    """Some of the rows, by number."""

    def __init__(self, rows: Sequence[T], numbers: Sequence[int]) -> None:
        self.rows = rows
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def build_row(self, i: int) -> T:
        return self.rows[self.numbers[i]]

    @property
    def lengths(self) -> Sequence[int]:
        lengths = row_lengths(self.rows)
        return [lengths[i] for i in self.numbers]


class TokenRows(LazyRows[Row]):
    """Rows of several blocks, one block after the other, or a selection of them, in order."""

    def __init__(self, blocks: Sequence[TokenBlock], chosen: np.ndarray | None = None) -> None:
        self.blocks = blocks
        self._starts = [0, *accumulate(len(block) for block in blocks)]
        self.chosen = np.arange(self._starts[-1]) if chosen is None else chosen

    def select(self, selection: np.ndarray | slice) -> TokenRows:
        """Rows by mask, by number, or from one on to another."""
        return TokenRows(self.blocks, self.chosen[selection])

    def __len__(self) -> int:
        return len(self.chosen)

    def build_row(self, i: int) -> Row:
        block, row = self.locate(i)
        return self.blocks[block].row(row)

    def locate(self, i: int) -> tuple[int, int]:
        """Block of a row, and its number there."""
        row = int(self.chosen[i])
        block = bisect_right(self._starts, row) - 1
        return block, row - self._starts[block]

    def column(self, name: str) -> np.ndarray:
        """One value a row: `lengths`, `supervised`, `cut`, `wanted`, `digest`, `prompt`, `example`."""
        return np.concatenate(
            [np.asarray(getattr(block, name)) for block in self.blocks] or [np.zeros(0, np.int64)]
        )[self.chosen]

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.column("lengths")

    @cached_property
    def has_pictures(self) -> np.ndarray:
        ends = [np.diff(block.pictures_end, prepend=0) > 0 for block in self.blocks]
        return np.concatenate(ends or [np.zeros(0, bool)])[self.chosen]

    def block_rows(self, block: int) -> np.ndarray:
        """Which of the rows, by number, come from a block."""
        return np.flatnonzero(
            (self.chosen >= self._starts[block]) & (self.chosen < self._starts[block + 1])
        )

    def tokens_used(self, *, learnt: bool = False) -> set[int]:
        """Every token of the blocks that rows were selected from, or every one that is learnt
        there; chunk by chunk.
        """
        used: set[int] = set()
        for block in self.blocks:
            for start in range(0, len(block.ids), _CHUNK):
                ids = block.ids[start : start + _CHUNK]
                ids = ids[block.learnt[start : start + _CHUNK]] if learnt else ids
                used.update(np.flatnonzero(np.bincount(ids)).tolist())
        return used

    def count_framed(self, bos: int | None, eos: int | None) -> np.ndarray:
        """int64[3]: rows that begin with `bos`, rows that begin with it twice, and rows whose last
        token is `eos`, and learnt.
        """
        counts = np.zeros(3, np.int64)
        for i, block in enumerate(self.blocks):
            rows = self.chosen[self.block_rows(i)] - self._starts[i]
            first = block.ends[rows] - block.lengths[rows]
            last = block.ends[rows] - 1
            has_bos = block.ids[first] == bos
            has_bos_twice = (
                has_bos & (first < last) & (block.ids[np.minimum(first + 1, last)] == bos)
            )
            has_eos = (block.ids[last] == eos) & block.learnt[last]
            counts += [has_bos.sum(), has_bos_twice.sum(), has_eos.sum()]
        return counts


def choose_held_out(digests: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool[R]: about `share` of the rows, at least one, and every copy of a row with it; never all
    of them.

    digests  uint64[R]  of the rows' tokens
    """
    distinct, inverse, copies = np.unique(digests, return_inverse=True, return_counts=True)
    order = np.argsort(mix_digests(distinct, seed), kind="stable")
    target = max(1, round(len(digests) * share))
    previous_rows = (
        np.cumsum(copies[order]) - copies[order]
    )  # rows already held when one's turn comes
    selected = order[previous_rows < target][: len(distinct) - 1]
    chosen = np.zeros(len(distinct), bool)
    chosen[selected] = True
    return chosen[inverse]


def mix_digests(digests: np.ndarray, seed: int) -> np.ndarray:
    """uint64[R]: digests mixed with a seed, evenly spread. Source: splitmix64, Steele et al. 2014."""
    with np.errstate(over="ignore"):
        x = digests.astype(np.uint64) ^ (np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def is_held_out(digests: np.ndarray, share: float, seed: int) -> np.ndarray:
    """bool[R]: the same choice for a stream, which decides about each row alone, since the other
    rows are unknown.
    """
    return mix_digests(digests, seed) < share * 2**64


class PackedRows(LazyRows[Row]):
    """Packed rows over `rows`; `packs[i]` are the numbers of the rows in the i-th."""

    def __init__(
        self,
        rows: TokenRows,
        packs: Sequence[np.ndarray],
        capacity: int,
        pack_blocks: Sequence[int],
    ) -> None:
        self.rows = rows
        self.packs = packs
        self.capacity = capacity
        self.pack_blocks = pack_blocks

    def __len__(self) -> int:
        return len(self.packs)

    def build_row(self, i: int) -> Row:
        rows = [self.rows[int(k)] for k in self.packs[i]]
        return rows[0] if rows[0].pictures else join_rows(rows)

    @cached_property
    def has_pictures(self) -> np.ndarray:
        return np.array([bool(self.rows.has_pictures[pack[0]]) for pack in self.packs], bool)

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths = self.rows.lengths
        return np.array([int(lengths[pack].sum()) for pack in self.packs], np.int64)

    def shares(self, shares: Sequence[Share]) -> list[Share]:
        """The shares of weighted sources, counted in packed rows."""
        return [Share(self.pack_blocks.count(i), share.weight) for i, share in enumerate(shares)]

    def facts(self) -> dict[str, Any]:
        tokens = int(self.lengths.sum())
        room = len(self) * self.capacity
        return {
            "rows": len(self.rows),
            "packed_rows": len(self),
            "filled": tokens / max(1, room),
            "length": self.capacity,
        }


def pack_rows(rows: TokenRows, capacity: int) -> PackedRows:
    """Packs the rows of each source by themselves. A row with pictures stays alone: each family has
    positions of its own for it.
    """
    packs: list[np.ndarray] = []
    pack_blocks: list[int] = []
    for block in range(len(rows.blocks)):
        numbers = rows.block_rows(block)
        alone = rows.has_pictures[numbers]
        text = numbers[~alone]
        new_packs = [text[pack] for pack in pack_best_fit(rows.lengths[text], capacity)] + [
            number[None] for number in numbers[alone]
        ]
        packs += new_packs
        pack_blocks += [block] * len(new_packs)
    return PackedRows(rows, packs, capacity, pack_blocks)


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Numbers of rows by pack; every row is in exactly one, no pack has more than `capacity`
    tokens.
    """
    packs: list[list[int]] = []
    # packs that have so much room left
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
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
            room = capacity
            pack = len(packs)
            packs.append([])
        packs[pack].append(i)
        by_room[room - n].append(pack)
        has_room |= 1 << (room - n)
    return [np.array(sorted(pack), np.int64) for pack in packs]


def join_rows(rows: Sequence[Row]) -> Row:
    """Several rows as one, each document's first label masked."""
    ids = tuple(i for row in rows for i in row.input_ids)
    labels = tuple(label for row in rows for label in (IGNORED, *row.labels[1:]))
    first = next((k for k, label in enumerate(labels) if label != IGNORED), 0)
    return Row(ids, labels, first, tuple(len(row.input_ids) for row in rows))
