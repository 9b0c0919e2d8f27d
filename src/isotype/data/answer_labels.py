"""Recognises columns that mark answers as unwanted, such as `label`, `kto_tag` and `feedback`.

Some objectives train on every answer. Such an objective would also train on unwanted answers, so
the run stops with an error at the first row with an answer that is marked as unwanted. Only the
user knows whether the column judges the answer or names a class, so the error message names the
settings for both cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config.yaml_text import write_value
from ..errors import UsageError
from .conversations import is_learnt
from .row_keys import normalise_name, normalise_word

# columns in which false marks an unwanted answer, and columns in which true does
_WANTED_COLUMNS = (
    "label", "kto_tag", "kto_label", "feedback", "thumbs", "thumb", "thumbs_up", "vote", "score", "verdict", "liked", "preferred",
    "desirable", "accepted", "is_accepted", "wanted", "correct", "is_correct", "is_good",
)  # fmt: skip
_UNWANTED_COLUMNS = (
    "rejected", "is_rejected", "thumbs_down", "disliked", "undesirable", "unwanted", "wrong", "is_wrong", "incorrect", "is_incorrect",
    "is_bad",
)  # fmt: skip
_YES = ("true", "t", "yes", "y", "1")  # words for a wanted answer
# values that mark a wanted answer
_WANTED_WORDS = (
    *_YES, "up", "thumbs_up", "thumbsup", "👍", "good", "like", "liked", "upvote", "accept", "accepted", "wanted", "desirable", "chosen",
    "right", "correct", "positive", "pos", "helpful",
)  # fmt: skip
_NO = (
    "false", "f", "no", "n", "0", "-1", "down", "thumbs_down", "thumbsdown", "👎", "bad", "dislike", "disliked", "downvote",
    "reject", "rejected", "unwanted", "undesirable", "wrong", "incorrect",
)  # fmt: skip
# `feedback: negative` marks an unwanted answer, but `label: negative` is the class of a review
_CLASS_NAMES = ("negative", "neg")
LEARN_LABELS_FIX = "train.objective=kto learns from labels (docs/preferences.md)"


def refuse_unwanted_answer(row: Mapping[str, Any], location: str, *, has_answer: bool) -> None:
    """Raises UsageError if the answer is marked as unwanted. The mark may be in a column of the
    row, or in a key of a turn that the model learns.

    row         the row, with its keys renamed by `data.columns`
    has_answer  False for a plain text. If a plain text has a number or a word as its label, this
                label may be the name of a class. So only the JSON value false marks a plain text as
                unwanted
    """
    for key, value in row.items():
        if not marks_unwanted(key, value) or not (has_answer or isinstance(value, bool)):
            continue
        raise UsageError(
            f"{location}: {key} is {write_value(value)}: that marks an unwanted answer, and this"
            " objective learns every answer",
            fix=(
                f"{_learn_labels_fix(key)}; or keep the wanted rows only; where {key} says something"
                f" else: data.columns: {write_value({key: None})}"
            ),
        )
    for key, value in _unwanted_turns(row) if has_answer else ():
        raise UsageError(
            f"{location}: a turn has {key}: {write_value(value)}: that marks an unwanted answer, and"
            " this objective learns every answer",
            fix=(
                f"{_learn_labels_fix(key)}; or weight: 0 in that turn shows it and does not learn"
                f" it; or leave {key} out"
            ),
        )


def _learn_labels_fix(column: str) -> str:
    """Returns advice to use the objective that learns from labels, with the setting that names the
    label column.
    """
    if column == "label":
        return LEARN_LABELS_FIX
    return f"{LEARN_LABELS_FIX}, with data.columns: {write_value({'label': column})}"


def marks_unwanted(key: str, value: Any) -> bool:
    """Returns True if a column with this name and value marks the answer as wrong or unwanted."""
    name = normalise_name(str(key))
    is_unwanted = name in _UNWANTED_COLUMNS
    if not is_unwanted and name not in _WANTED_COLUMNS:
        return False
    if isinstance(value, str):
        word = normalise_word(value)
        if is_unwanted:
            return word in _YES
        return word in _NO or (name != "label" and word in _CLASS_NAMES)
    if not _is_number(value):
        return False
    return bool(value > 0 if is_unwanted else value <= 0)


def is_unwanted_column(name: str) -> bool:
    """Returns True if a column of this name marks an unwanted answer with the value true."""
    return normalise_name(name) in _UNWANTED_COLUMNS


def is_label_column(name: str) -> bool:
    """Returns True if a column of this name says which answers are wanted."""
    return normalise_name(name) in (*_WANTED_COLUMNS, *_UNWANTED_COLUMNS)


def parse_answer_label(value: Any) -> bool | None:
    """Returns True for a value that marks a wanted answer, False for an unwanted one, None for
    other values.
    """
    if isinstance(value, str):
        word = normalise_word(value)
        if word in _WANTED_WORDS:
            return True
        return False if word in (*_NO, *_CLASS_NAMES) else None
    if _is_number(value) and value in (-1, 0, 1):
        return bool(value > 0)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _unwanted_turns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the (key, value) pairs that mark an answer as unwanted, from all turns that the model
    learns.
    """
    for key in ("messages", "conversations", "completion"):
        turns = row.get(key)
        for turn in turns if isinstance(turns, list) else ():
            if not isinstance(turn, dict) or not is_learnt(turn):
                continue
            yield from (
                (name, value) for name, value in turn.items() if marks_unwanted(name, value)
            )
