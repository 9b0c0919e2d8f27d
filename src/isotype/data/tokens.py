"""Stores tokenised rows in flat arrays, in memory or memory-mapped from a file. Rows that are
memory-mapped take up memory only while they are used. R is the number of rows, and N is the total
number of their tokens.

ids         int32[N]   tokens of all rows, one after the other
learnt      bool[N]    whether a token is learnt
ends        int64[R]   end of each row in `ids`
example     int64[R]   number of the row in its source, from 0; -1 for a window of plain text
cut         bool[R]    the row was longer than data.max_length
wanted      bool[R]    the label of an answer; true if the row has no label
supervised  int32[R]   number of tokens that give a loss
digest      uint64[R]  hash of the tokens and pictures; rows with the same digest are treated as
            copies (among a million different rows, two have the same 64-bit hash with a
            probability of 1 in 40 million)
prompt      uint64[R]  hash of the tokens before the first learnt token; 0 if there are no such
            tokens
pictures    uint8[P]   the references of all rows' pictures as UTF-8, one per line
pictures_end int64[R]  end of each row's references in `pictures`
"""

from __future__ import annotations

import base64
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
    IGNORE_INDEX,
    Row,
    Share,
    is_picture_unchanged,
    picture_digest,
    picture_path,
    row_lengths,
)

T = TypeVar("T")
_CHUNK = 1 << 22  # number of tokens that are counted at once
COLUMNS: Mapping[str, str] = {
    "ids": "int32", "learnt": "bool", "ends": "int64", "example": "int64", "cut": "bool", "wanted": "bool",
    "supervised": "int32", "digest": "uint64", "prompt": "uint64", "pictures": "uint8",
    "pictures_end": "int64",
}  # fmt: skip


class TokenBlock:
    """The rows of one source. `facts` contains the counts that were made while the source was read."""

    def __init__(self, columns: Mapping[str, np.ndarray], facts: dict[str, Any]) -> None:
        self.ids = columns["ids"]
        self.learnt = columns["learnt"]
        self.ends = columns["ends"]
        self.example, self.cut, self.wanted, self.supervised = (
            columns[name] for name in ("example", "cut", "wanted", "supervised")
        )
        self.digest = columns["digest"]
        self.prompt = columns["prompt"]
        self.pictures = columns["pictures"]
        self.pictures_end = columns["pictures_end"]
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        """Returns the block as JSON, to send it to another process."""
        columns = {
            name: base64.b64encode(np.ascontiguousarray(getattr(self, name)).data).decode()
            for name in COLUMNS
        }
        return {"columns": columns, "facts": self.facts}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TokenBlock:
        columns = {
            name: np.frombuffer(base64.b64decode(value["columns"][name]), dtype)
            for name, dtype in COLUMNS.items()
        }
        return cls(columns, value["facts"])

    @classmethod
    def join(cls, blocks: Sequence[TokenBlock], facts: dict[str, Any]) -> TokenBlock:
        """Returns one block with the rows of several blocks."""
        columns = {
            name: np.concatenate([getattr(block, name) for block in blocks]) for name in COLUMNS
        }
        # the ends of a block's rows are counted from the beginning of the block
        for name, part in (("ends", "ids"), ("pictures_end", "pictures")):
            sizes = [len(getattr(block, part)) for block in blocks]
            starts = np.cumsum([0, *sizes[:-1]])
            columns[name] = columns[name] + np.repeat(starts, [len(block) for block in blocks])
        return cls(columns, facts)

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
        labels = np.where(learnt, ids, IGNORE_INDEX)
        return Row(
            tuple(ids.tolist()),
            tuple(labels.tolist()),
            int(learnt.argmax()),
            pictures=self.references(i),
        )

    def references(self, i: int) -> tuple[str, ...]:
        """Returns the references of a row's pictures."""
        start = int(self.pictures_end[i - 1]) if i else 0
        end = int(self.pictures_end[i])
        if end > start:
            return tuple(self.pictures[start:end].tobytes().decode().splitlines())
        return ()

    def find_missing_picture(self) -> str | None:
        """Returns the path of the first picture that was changed or removed after tokenising, or
        None.
        """
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
    """Returns a 64-bit hash of a row's tokens and pictures."""
    ids = np.asarray(input_ids, np.int32)
    picture_digests = "".join(map(picture_digest, pictures)).encode()
    return int.from_bytes(
        hashlib.blake2b(ids.tobytes() + picture_digests, digest_size=8).digest(), "little"
    )


class TokenWriter:
    """Collects rows into the columns of a block. The columns are in memory, or in `files`, which
    maps the name of a column to an open file.
    """

    def __init__(self, files: Mapping[str, IO[bytes]] | None = None) -> None:
        if files is not None:
            self.files: Mapping[str, Any] = files
        else:
            self.files = {name: io.BytesIO() for name in COLUMNS}
        self.end = self.rows = self.pictures_end = 0

    def add(self, row: Row, *, example: int, cut: bool, is_wanted: bool = True) -> None:
        ids = np.asarray(row.input_ids, np.int32)
        learnt = np.asarray(row.labels, np.int64) != IGNORE_INDEX
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
        """Returns the rows that were collected in memory."""
        return TokenBlock(
            {
                name: np.frombuffer(self.files[name].getvalue(), dtype)
                for name, dtype in COLUMNS.items()
            },
            facts,
        )


class LazyRowSequence(Sequence[T]):
    """A sequence whose rows are built by `build_row` when they are accessed. A slice is a
    `Selection`.
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


class Selection(LazyRowSequence[T]):
    """A selection of rows. The rows are given by their numbers."""

    def __init__(self, rows: Sequence[T], row_numbers: Sequence[int]) -> None:
        self.rows = rows
        self.row_numbers = row_numbers

    def __len__(self) -> int:
        return len(self.row_numbers)

    def build_row(self, i: int) -> T:
        return self.rows[self.row_numbers[i]]

    @property
    def lengths(self) -> Sequence[int]:
        lengths = row_lengths(self.rows)
        return [lengths[i] for i in self.row_numbers]


class TokenRows(LazyRowSequence[Row]):
    """The rows of several blocks, one block after the other, or a selection of these rows.
    `row_numbers` contains the numbers of the selected rows.
    """

    def __init__(self, blocks: Sequence[TokenBlock], row_numbers: np.ndarray | None = None) -> None:
        self.blocks = blocks
        self._starts = [0, *accumulate(len(block) for block in blocks)]
        self.row_numbers = np.arange(self._starts[-1]) if row_numbers is None else row_numbers

    def select(self, selection: np.ndarray | slice) -> TokenRows:
        """Returns the selected rows. The selection is a mask, an array of row numbers, or a slice."""
        return TokenRows(self.blocks, self.row_numbers[selection])

    def __len__(self) -> int:
        return len(self.row_numbers)

    def build_row(self, i: int) -> Row:
        block, row = self.locate(i)
        return self.blocks[block].row(row)

    def locate(self, i: int) -> tuple[int, int]:
        """Returns the number of the block that contains a row, and the number of the row within
        this block.
        """
        row = int(self.row_numbers[i])
        block = bisect_right(self._starts, row) - 1
        return block, row - self._starts[block]

    def column(self, name: str) -> np.ndarray:
        """Returns the column `name` of the table of rows, which contains one value for each row.
        `name` is `lengths`, `supervised`, `cut`, `wanted`, `digest`, `prompt` or `example`.
        """
        return np.concatenate(
            [np.asarray(getattr(block, name)) for block in self.blocks] or [np.zeros(0, np.int64)]
        )[self.row_numbers]

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.column("lengths")

    @cached_property
    def has_pictures(self) -> np.ndarray:
        ends = [np.diff(block.pictures_end, prepend=0) > 0 for block in self.blocks]
        return np.concatenate(ends or [np.zeros(0, bool)])[self.row_numbers]

    def block_row_numbers(self, block: int) -> np.ndarray:
        """Returns the numbers of the rows that come from a block."""
        return np.flatnonzero(
            (self.row_numbers >= self._starts[block]) & (self.row_numbers < self._starts[block + 1])
        )

    def tokens_used(self, *, learnt: bool = False) -> set[int]:
        """Returns the set of token ids that occur in all blocks, or only of those that the model
        learns. The tokens of a block are read in chunks, so that a large block needs little memory.
        """
        used: set[int] = set()
        for block in self.blocks:
            for start in range(0, len(block.ids), _CHUNK):
                ids = block.ids[start : start + _CHUNK]
                ids = ids[block.learnt[start : start + _CHUNK]] if learnt else ids
                used.update(np.flatnonzero(np.bincount(ids)).tolist())
        return used

    def count_bos_and_eos(self, bos: int | None, eos: int | None) -> np.ndarray:
        """Returns three numbers, int64[3]. The first number counts the rows that begin with `bos`.
        The second counts the rows that begin with `bos` twice. The third counts the rows that end
        with `eos`, if the model learns this token.
        """
        counts = np.zeros(3, np.int64)
        for i, block in enumerate(self.blocks):
            rows = self.row_numbers[self.block_row_numbers(i)] - self._starts[i]
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
    """Chooses the rows to hold out for evaluation. About the fraction `share` of all rows is held
    out, but at least one row and never all rows. Copies of a row are either all held out or all
    kept.

    digests  uint64[R]  hashes of the rows' tokens
    ->       bool[R]    whether the row is held out
    """
    distinct, inverse, copies = np.unique(digests, return_inverse=True, return_counts=True)
    order = np.argsort(mix_digests(distinct, seed), kind="stable")
    target = max(1, round(len(digests) * share))
    # number of rows before each distinct row in this order
    previous_rows = np.cumsum(copies[order]) - copies[order]
    selected = order[previous_rows < target][: len(distinct) - 1]
    chosen = np.zeros(len(distinct), bool)
    chosen[selected] = True
    return chosen[inverse]


def mix_digests(digests: np.ndarray, seed: int) -> np.ndarray:
    """Combines each digest with a seed. The results, uint64[R], are uniformly distributed. Source:
    splitmix64, Steele et al. 2014.
    """
    with np.errstate(over="ignore"):
        x = digests.astype(np.uint64) ^ (np.uint64(seed % 2**64) * np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def is_held_out(digests: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Returns which rows of a stream to hold out, bool[R]. The decision for a row depends only on
    this row, because the later rows of a stream are not known yet.
    """
    return mix_digests(digests, seed) < share * 2**64


class PackedRows(LazyRowSequence[Row]):
    """Joins several rows into each packed row. Packed row i consists of the rows with the numbers
    `packs[i]`.
    """

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
        """Returns the shares of weighted sources with the numbers of packed rows in place of the
        numbers of rows before packing.
        """
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
    """Packs the rows of each source separately. A row with pictures is not joined with other rows,
    because each model family has its own way to number the positions of pictures.
    """
    packs: list[np.ndarray] = []
    pack_blocks: list[int] = []
    for block in range(len(rows.blocks)):
        numbers = rows.block_row_numbers(block)
        has_picture = rows.has_pictures[numbers]
        text = numbers[~has_picture]
        new_packs = [text[pack] for pack in pack_best_fit(rows.lengths[text], capacity)] + [
            number[None] for number in numbers[has_picture]
        ]
        packs += new_packs
        pack_blocks += [block] * len(new_packs)
    return PackedRows(rows, packs, capacity, pack_blocks)


def pack_best_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Packs rows by best fit and returns the numbers of the rows in each pack. Every row is in
    exactly one pack, and no pack has more than `capacity` tokens.
    """
    packs: list[list[int]] = []
    # by_room[r]: the packs with room for r more tokens
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    room_bits = 0  # bit r: by_room[r] is not empty
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        fitting_bits = room_bits >> length
        if fitting_bits:
            room = length + (fitting_bits & -fitting_bits).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                room_bits ^= 1 << room
        else:
            room = capacity
            pack = len(packs)
            packs.append([])
        packs[pack].append(i)
        by_room[room - length].append(pack)
        room_bits |= 1 << (room - length)
    return [np.array(sorted(pack), np.int64) for pack in packs]


def join_rows(rows: Sequence[Row]) -> Row:
    """Joins several rows into one. In each of the joined rows, the first token gets no loss,
    because the token before it belongs to another row.
    """
    ids = tuple(i for row in rows for i in row.input_ids)
    labels = tuple(label for row in rows for label in (IGNORE_INDEX, *row.labels[1:]))
    first = next((k for k, label in enumerate(labels) if label != IGNORE_INDEX), 0)
    return Row(ids, labels, first, tuple(len(row.input_ids) for row in rows))
