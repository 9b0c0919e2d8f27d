"""The rows of a trainer's dataset as token rows, where they are tokens: the input of the checks of labels, end tokens and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..data.rows import IGNORED, Row

MOST = 4096  # rows looked at: the first ones
_LENGTHS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids", "completion_ids")


@dataclass(frozen=True)
class TrainerRows:
    """train, eval: as tokens, empty where they are none; largest: the rows of the largest batch, as the dataset has them."""

    train: Sequence[Row]
    eval: Sequence[Row]
    largest: Sequence[Any]
    largest_eval: Sequence[Any]
    why_no_tokens: str = ""

    @property
    def tokens(self) -> bool:
        return bool(self.train)

    @classmethod
    def of(cls, trainer: Any) -> TrainerRows:
        args = trainer.args
        train, why = _first(trainer.train_dataset)
        evaluated = trainer.eval_dataset
        evaluated, _ = _first(next(iter(evaluated.values()), None) if isinstance(evaluated, dict) else evaluated)
        rows = _token_rows(train)
        return cls(
            rows,
            _token_rows(evaluated) if rows else [],
            _largest(train, args.per_device_train_batch_size),
            _largest(evaluated, args.per_device_eval_batch_size),
            why or "the rows are no plain tokens with labels",
        )

    @classmethod
    def unread(cls) -> TrainerRows:
        return cls([], [], [], [], "the dataset, collator or loss holds an iterator, which reading rows would take from")


def _first(dataset: Any) -> tuple[list[Any], str]:
    """The first rows; a stream is not read, as that would take rows from it."""
    if dataset is None:
        return [], "no dataset"
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return [], "the dataset is a stream"
    return [dataset[i] for i in range(min(MOST, len(dataset)))], ""


def _ids(value: Any) -> tuple[int, ...] | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, list | tuple) and all(isinstance(i, int) for i in value) else None


def _token_rows(rows: list[Any]) -> list[Row]:
    """Rows with input_ids; labels from their column, or every token where only ids are given. Padding of masked positions is left out."""
    made = []
    for row in rows:
        ids = _ids(row.get("input_ids")) if isinstance(row, dict) else None
        if ids is None:
            return []
        labels = _ids(row["labels"]) if row.get("labels") is not None else None
        mask = _ids(row["completion_mask"]) if row.get("completion_mask") is not None else None
        if labels is None:
            labels = ids if mask is None else tuple(i if m else IGNORED for i, m in zip(ids, mask))
        if len(labels) != len(ids):  # an encoder-decoder's
            return []
        mask = _ids(row["attention_mask"]) if row.get("attention_mask") is not None else None
        if mask is not None:
            there = [k for k, seen in enumerate(mask) if seen]
            ids, labels = tuple(ids[k] for k in there), tuple(labels[k] for k in there)
        prompt = next((k for k, label in enumerate(labels) if label != IGNORED), len(labels))
        made.append(Row(ids, labels, prompt))
    return made


def _largest(rows: list[Any], count: int) -> list[Any]:
    def length(row: Any) -> int:
        return sum(len(row[name]) for name in _LENGTHS if name in row and hasattr(row[name], "__len__")) if isinstance(row, dict) else 0

    return sorted(rows, key=length, reverse=True)[:count] if any(length(row) for row in rows) else []
