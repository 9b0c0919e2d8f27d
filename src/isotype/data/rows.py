"""Defines the data types that training uses: rows of tokens, prompts for samples, and the content
of data.json. This module also computes the order of the rows in training, which depends only on the
seed. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..wording import pluralise, shorten_lines
from .bad_rows import BadRow

T = TypeVar("T")
# the label of a token without a loss: torch's and transformers' cross-entropy ignore it
IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Row:
    """Contains one sequence of tokens with its labels. `labels[i]` is `input_ids[i]` if the model
    learns this token, otherwise -100. The labels are not shifted here; the model shifts them.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    prompt_length: int
    """The number of tokens before the first learnt one."""
    documents: tuple[int, ...] = ()
    """For a packed row: the number of tokens of each document in it, in order. The first label of a
    document is never learnt.
    """
    pictures: tuple[str, ...] = ()
    """References of the row's pictures (`pictures.Pictures.reference`), in the order of their
    tokens.
    """

    @property
    def supervised(self) -> int:
        """Returns the number of tokens for which a loss is computed. The model does not predict the
        first token of a row, so the first label is never counted.
        """
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt that the model answers during training."""

    text: str
    """The text shown to the user."""
    input_ids: tuple[int, ...]
    """The text given to the model, with the template's generation prompt."""
    reference: str | None = None
    """The answer in the data, if there is one."""
    pictures: tuple[str, ...] = ()
    """References of its pictures, as in `Row`."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation that was rendered; empty for a plain text."""
    tools: Any = None
    """The tools of the conversation."""


@dataclass(frozen=True, slots=True)
class Share:
    """Says how many of the training rows come from one source. `rows` is the number of rows of this
    source. The list of all rows contains first all rows of the first source, then all rows of the
    second source, and so on. `weight` says how often these rows are used, relative to the rows of
    other sources.
    """

    rows: int
    weight: float


@dataclass(frozen=True, slots=True)
class LoadedData:
    """Contains everything that a run uses from its data, such as the training and evaluation rows.

    prompts  the prompts of the samples
    facts    the counts and settings of the data, which data.json stores
    """

    train: Sequence[Row]
    """The training rows. With `stream` only the first rows, for the checks before training."""
    eval: Sequence[Row]
    prompts: Sequence[SamplePrompt]
    chat_template: str | None
    """The template that rendered the rows. The run saves it in its tokenizer. None if no row is a
    chat.
    """
    facts: dict[str, Any] = field(repr=False)
    shares: Sequence[Share] = ()
    """The shares of weighted sources. Empty if every row comes once per epoch."""
    bad_rows: Sequence[BadRow] = ()
    """The rows that were left out. bad_rows.jsonl lists them."""
    eval_sets: Mapping[str, int] = field(default_factory=dict)
    """Name of each evaluation set -> the number of its rows; the rows of sets follow one another.
    Empty if the sets have no names.
    """
    stream: Any = None
    """With `data.stream`: the stream of training rows (`stream.StreamedRows`)."""
    pictures: Any = None
    """A `Pictures` if a row has pictures, else None."""

    def fingerprints(self) -> dict[str, str]:
        """Returns two hashes, one of the training rows before packing and one of the evaluation
        rows. The hashes depend on the tokens and the labels.
        """
        return {"training": _hash_rows(self.documents), "evaluation": _hash_rows(self.eval)}

    @property
    def documents(self) -> Sequence[Row]:
        """Returns the training rows before packing."""
        return getattr(self.train, "rows", self.train)

    def longest(self, count: int) -> list[Row]:
        """Returns the `count` rows of the largest batch that training can have."""
        lengths = row_lengths(self.train)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        if self.pictures is not None:  # in a batch either all rows have pictures or none has
            has_picture = has_pictures(self.train)
            order = [i for i in order if has_picture[i]] or order
        rows = [self.train[i] for i in order[:count]]
        if self.stream is not None:
            return [_stretch_row(row, self.facts["max_length"]) for row in rows]
        return rows


def picture_path(reference: str) -> Path:
    return Path(reference.split(" ", 2)[2])


def picture_digest(reference: str) -> str:
    return reference.split(" ", 1)[0]


def is_picture_unchanged(reference: str) -> bool:
    """Returns True if the picture's file still has the modification time that it had when its row
    was tokenised.
    """
    _, time, path = reference.split(" ", 2)
    try:
        return os.stat(path).st_mtime_ns == int(time)
    except OSError:
        return False


def _hash_rows(rows: Sequence[Row]) -> str:
    column = getattr(rows, "column", None)
    if column is None:
        chunks = (str(hash(row)).encode() for row in rows)
    else:
        columns = [column(name) for name in ("digest", "supervised", "wanted")]
        chunks = (values.tobytes() for values in (columns[:2] if columns[2].all() else columns))
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
        digest.update(b",")
    return digest.hexdigest()


def row_lengths(rows: Sequence[Any]) -> Sequence[int]:
    """Returns the number of tokens of each row. If the rows are stored in flat arrays, their
    lengths are known and no `Row` object is built.
    """
    lengths = getattr(rows, "lengths", None)
    return [len(row.input_ids) for row in rows] if lengths is None else lengths


def row_supervised(rows: Sequence[Row]) -> Sequence[int]:
    """Returns, for each row, the number of tokens for which a loss is computed. If the rows are
    stored in flat arrays, no `Row` object is built.
    """
    column = getattr(rows, "column", None)
    return [row.supervised for row in rows] if column is None else column("supervised").tolist()


def has_pictures(rows: Sequence[Row]) -> Sequence[bool]:
    """Returns, for each row, whether it has pictures. If the rows are stored in flat arrays, no
    `Row` object is built.
    """
    flags = getattr(rows, "has_pictures", None)
    return [bool(row.pictures) for row in rows] if flags is None else flags


def tokens_used(rows: Sequence[Row], *, learnt: bool = False) -> set[int]:
    """Returns the set of token ids that occur in the rows, or only of those that the model learns.
    If the rows are stored in flat arrays, no `Row` object is built.
    """
    if (read_tokens := getattr(rows, "tokens_used", None)) is not None:
        return set(read_tokens(learnt=learnt))
    return {i for row in rows for i in (row.labels if learnt else row.input_ids)} - {IGNORE_INDEX}


def _stretch_row(row: Row, length: int) -> Row:
    """Repeats the tokens of a row until the row has `length` tokens."""
    times = -(-length // len(row.input_ids))
    if times == 1:
        return row
    documents = (length,) if row.documents else ()
    return Row(
        (row.input_ids * times)[:length],
        (row.labels * times)[:length],
        row.prompt_length,
        documents,
    )


# the first rows, among which the median and the longest row are searched; a stream has no end
SAMPLED_ROWS = 1000
MAX_TOKENS = 512  # largest number of tokens of a row that are shown


def example_rows(rows: Sequence[Row], tokenizer: Any, pictures: Any = None) -> list[dict[str, Any]]:
    """Returns up to four examples. The examples are the first row, a row of median length, the
    longest row, and the first row with a picture. Each example is split into parts that the model
    learns and parts that it does not learn.

    pictures  the run's `Pictures`, which gives thumbnails of a row's pictures as `data:` URLs

    A part is an object `{"text", "learnt"}`; its text contains the special tokens too. `tokens` and
    `learnt` count the tokens of the whole row. `left_out` counts the tokens that are not shown.
    """
    sample = list(islice(rows, SAMPLED_ROWS))
    by_length = sorted(range(len(sample)), key=lambda i: len(sample[i].input_ids))
    labels: dict[int, str] = {}
    for label, i in (
        (
            ("the first row", 0),
            ("of median length", by_length[len(sample) // 2]),
            ("the longest", by_length[-1]),
        )
        if sample
        else ()
    ):
        labels.setdefault(i, label)
    if pictures is not None and not any(sample[i].pictures for i in labels):
        labels |= dict.fromkeys(
            [i for i, row in enumerate(sample) if row.pictures][:1], "the first with a picture"
        )
    return [
        {"which": label, "row": i, **_example_facts(sample[i], tokenizer, pictures)}
        for i, label in labels.items()
    ]


def format_row(row: Row, tokenizer: Any) -> str:
    """Returns the text of a row up to its first learnt part, which stands between >>> and <<<. Long
    parts are shortened in the middle.
    """
    shown = []
    later_parts = list(_example_facts(row, tokenizer, None)["parts"])
    while later_parts:
        part = later_parts.pop(0)
        text = shorten_lines(part["text"], max_lines=4, max_length=200)
        shown.append(f">>> {text} <<<" if part["learnt"] else text)
        if part["learnt"]:
            break
    learnt_count = sum(part["learnt"] for part in later_parts)
    rest_text = f"\n(and {pluralise(learnt_count, 'learnt part')} more)" if learnt_count else ""
    return f"{' '.join(shown)}{rest_text}"


# a run of four or more equal tokens, such as the placeholders of a picture
_REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")


def _shorten_repeats(match: re.Match[str]) -> str:
    return f"{match[1]} x {len(match[0]) // len(match[1])} "


def _example_facts(row: Row, tokenizer: Any, pictures: Any) -> dict[str, Any]:
    tokens = list(zip(row.input_ids, row.labels))[:MAX_TOKENS]
    parts = []
    for learnt, pairs in groupby(tokens, key=lambda pair: pair[1] != IGNORE_INDEX):
        ids = [token for token, _ in pairs]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append(
            {
                "text": _REPEATED.sub(_shorten_repeats, text) if row.pictures else text,
                "learnt": learnt,
            }
        )
    if row.pictures and pictures is not None:
        thumbnails = {"pictures": [pictures.thumbnail(reference) for reference in row.pictures]}
    else:
        thumbnails = {}
    return thumbnails | {
        "tokens": len(row.input_ids),
        "learnt": row.supervised,
        "left_out": len(row.input_ids) - len(tokens),
        "parts": parts,
    }


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Returns the order of the rows in one epoch. The order depends only on seed and epoch, not on
    the global random state.
    """
    if not shuffle:
        return list(range(rows))
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(rows, generator=generator).tolist()


def mixed_order(shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Returns the order of the rows in one epoch of weighted sources. An epoch has as many rows as
    all sources have together. The weights decide how many rows of the epoch come from each source.

    Each source continues where it stopped in the previous epoch, and is shuffled again after each
    pass over its rows. The rows of the sources are mixed at random. If `shuffle` is false, the rows
    of each source are evenly spaced in the epoch.
    """
    source_rows = _rows_per_source(shares)
    queues = []
    offset = 0
    for k, (share, quota) in enumerate(zip(shares, source_rows)):
        first_row = epoch * quota
        passes = {
            pass_number: epoch_order(
                share.rows, seed=seed * 1009 + k + 1, epoch=pass_number, shuffle=shuffle
            )
            for pass_number in range(
                first_row // share.rows, (first_row + quota - 1) // share.rows + 1
            )
        }
        queues.append(
            iter(
                [
                    offset + passes[row // share.rows][row % share.rows]
                    for row in range(first_row, first_row + quota)
                ]
            )
        )
        offset += share.rows
    if shuffle:
        source_order = [k for k, quota in enumerate(source_rows) for _ in range(quota)]
        source_order = [
            source_order[i]
            for i in epoch_order(len(source_order), seed=seed, epoch=epoch, shuffle=True)
        ]
    else:
        source_order = [
            k
            for _, k in sorted(
                ((i + 0.5) / quota, k) for k, quota in enumerate(source_rows) for i in range(quota)
            )
        ]
    return [next(queues[k]) for k in source_order]


def _rows_per_source(shares: Sequence[Share]) -> list[int]:
    """Returns the number of rows of each source in an epoch. Shares are rounded down; the remaining
    rows go to the sources with the largest remainders.
    """
    rows = sum(share.rows for share in shares)
    weight = sum(share.weight for share in shares)
    exact = [rows * share.weight / weight for share in shares]
    quotas = [int(q) for q in exact]
    for k in sorted(range(len(shares)), key=lambda k: quotas[k] - exact[k])[: rows - sum(quotas)]:
        quotas[k] += 1
    return quotas


class RowStream(Generic[T]):
    """Yields rows endlessly, from rows in memory or in the cache. Implements `training.task.Feed`.
    Its only state is `position`, the number of rows taken so far. When a run is resumed, it
    therefore continues with exactly the next row.
    """

    def __init__(
        self, rows: Sequence[T], *, seed: int, shuffle: bool, shares: Sequence[Share] = ()
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self.shares = shares
        self._epoch = -1
        self._order = list[int]()

    def take(self, count: int) -> list[T]:
        rows = []
        for _ in range(count):
            epoch, index = divmod(self.position, len(self.rows))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = self._epoch_order(epoch)
            rows.append(self.rows[self._order[index]])
            self.position += 1
        return rows

    def _epoch_order(self, epoch: int) -> list[int]:
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
