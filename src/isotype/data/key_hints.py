"""Gives hints for rows whose keys match no format. A hint names the key that was probably meant, or
the value of `data.columns` with which the row can be read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.yaml_text import write_value
from .answer_labels import is_label_column, parse_answer_label
from .row_keys import FORMATS, PREFERENCE_KEYS, TURN_KEYS, FormatName, labelled_format

# common names of a question and its answer in data sets; the hint asks the user to confirm them
_PAIR_KEYS = (
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"), ("instruction", "response"),
    ("input", "output"), ("prompt", "response"), ("prompt", "answer"), ("source", "target"),
)  # fmt: skip
# keys that often hold a question, for hints
_QUESTION_KEYS = ("question", "query", "input", "source", "user", "context")
# names of a wanted and an unwanted answer to one question
_CHOSEN_KEYS = (
    PREFERENCE_KEYS, ("chosen_response", "rejected_response"), ("chosen_answer", "rejected_answer"), ("preferred", "dispreferred"),
    ("preferred", "rejected"), ("accepted", "rejected"), ("answer", "rejected"), ("better", "worse"), ("win", "lose"),
    ("positive", "negative"), ("response_chosen", "response_rejected"), ("good", "bad"),
)  # fmt: skip
# keys of Alpaca's format that may accompany a question and its answer -> their names in data sets
_PAIR_OPTIONAL_KEYS = {
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
}


def unknown_row_hint(row: Mapping[str, Any]) -> str:
    """Returns a hint for a row whose keys match no format. The first hint that applies is returned."""
    object_lists = [
        key
        for key, value in row.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    turn_lists = [key for key in object_lists if TURN_KEYS & row[key][0].keys()]
    return (
        _pair_hint(row)
        or _class_or_embedding_hint(row)
        or _similar_key_hint(row, object_lists, turn_lists)
        or _missing_key_hint(row)
        or _list_hint(object_lists, turn_lists)
        or (
            f"no known format in the keys ({list_keys(row)}): use messages, or prompt and"
            " completion, or text, or name them in data.columns"
        )
    )


# keys of data for the classification of texts, which is not offered
_TEXT_KEYS = ("sentence", "text", "review", "tweet", "comment", "content", "title", "document")
_CLASS_KEYS = ("label", "labels", "label_text", "class", "category", "intent", "sentiment")
_EMBEDDING_KEYS = (
    ("anchor", "positive"),
    ("query", "pos"),
    ("query", "positive"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
)


def _class_or_embedding_hint(row: Mapping[str, Any]) -> str:
    """Returns a hint for a row that is meant for a classifier or an embedding model."""
    for first, second in _EMBEDDING_KEYS:
        if first in row and second in row:
            return (
                f"{first} and {second} are a pair for an embedding model. Isotype trains no embedding"
                " models: use sentence-transformers, for example"
            )
    text_key = next((key for key in _TEXT_KEYS if key in row), None)
    class_key = next((key for key in _CLASS_KEYS if key in row), None)
    if text_key is None or class_key is None:
        return ""
    hint = (
        f"{text_key} and {class_key} are a text and its class, and a trainer of classes is not"
        f" offered; a language model learns the class as an answer with data.columns: {{prompt:"
        f" {text_key}, completion: {class_key}}}"
    )
    if not isinstance(row[class_key], str):
        hint += f", where {class_key} is the class's name as text"
    return hint


def _pair_hint(row: Mapping[str, Any]) -> str:
    """Returns a hint for two keys that are probably a question and its answer."""
    columns = _pair_columns(row)
    if not columns:
        return ""
    question, answer, *others = columns.values()
    beside = f" beside {', '.join(others)}" if others else ""
    return (
        f"the row has {question} and {answer}{beside}; if these are question and answer:"
        f" data.columns: {_format_columns(columns)}"
    )


def _pair_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a mapping from Isotype's keys to the row's keys. The mapping contains the keys for a
    question, its answer, and optional parts such as a system prompt. Returns {} if the row has no
    question with an answer.
    """
    names = _spelt_names(row)
    pair = next((pair for pair in _PAIR_KEYS if pair[0] in names and pair[1] in names), None)
    if pair is None:
        return {}
    question, answer = (names[key] for key in pair)
    optional = {
        key: names[name]
        for key, candidates in _PAIR_OPTIONAL_KEYS.items()
        for name in candidates
        if name in names and name not in pair
    }
    if optional:
        return {"instruction": question, "output": answer, **optional}
    return {"prompt": question, "completion": answer}


def _spelt_names(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns a mapping with which a key of the row can be found by its name. A name is either the
    key itself, or the key in lower case without blanks at its ends. If a name belongs to two keys,
    the key with exactly this spelling is used.
    """
    names = {key.strip().casefold(): key for key in row if isinstance(key, str)}
    return names | {key: key for key in row if isinstance(key, str)}


def _format_columns(columns: Mapping[str, str]) -> str:
    return write_value({key: name for key, name in columns.items() if key != name})


def preference_or_label_hint(row: Mapping[str, Any], objective_format: FormatName) -> str:
    """Returns the setting `data.columns: {...}` for a row in which the keys of the pair or the
    label have other names. Returns "" if no such keys are found.
    """
    names = _spelt_names(row)
    if objective_format == "labelled":
        columns = {} if "label" in row else _label_columns(row)
        if columns and labelled_format(row) is None:
            columns = _pair_columns(row) | columns
    else:
        answers = next((pair for pair in _CHOSEN_KEYS if all(key in names for key in pair)), None)
        if answers is None:
            return ""
        columns = {key: names[name] for key, name in zip(PREFERENCE_KEYS, answers, strict=True)}
        columns |= _first_column(names, "prompt", ("prompt", *_QUESTION_KEYS))
        columns |= _first_column(names, "system", ("system", "system_prompt"))
    columns = {key: name for key, name in columns.items() if key != name}
    return f"data.columns: {write_value(columns)}" if columns else ""


def columns_for_chosen_answer(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns the value of `data.columns` with which a run trains on the chosen answers only,
    without the rejected ones.
    """
    if not isinstance(row.get("chosen"), str):
        return {"messages": "chosen"}
    prompt = _first_column(_spelt_names(row), "prompt", ("prompt", "instruction", *_QUESTION_KEYS))
    return {key: name for key, name in prompt.items() if key != name} | {"completion": "chosen"}


def _first_column(names: Mapping[str, str], key: str, candidates: Sequence[str]) -> dict[str, str]:
    name = next((name for name in candidates if name in names), None)
    return {} if name is None else {key: names[name]}


def _label_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns `{label: NAME}`, where NAME is a column that judges the answer. NAME is a key of the
    row or a key of the row's last turn.
    """
    turns: list[Any] = next(
        (row[key] for key in ("messages", "conversations") if isinstance(row.get(key), list)), []
    )
    last_turn = turns[-1] if turns and isinstance(turns[-1], dict) else {}
    for keys in (row, last_turn):
        for name, value in keys.items():
            if is_label_column(name) and (value is None or parse_answer_label(value) is not None):
                return {"label": name}
    return {}


def _similar_key_hint(
    row: Mapping[str, Any], object_lists: Sequence[str], turn_lists: Sequence[str]
) -> str:
    """Returns a hint for a misspelt key of a format."""
    known_keys = {key for row_format in FORMATS.values() for key in row_format.keys}
    not_values = set(object_lists) - set(turn_lists)
    candidates = [
        key
        for key, value in row.items()
        if not (key in known_keys or key in not_values or isinstance(value, dict))
    ]
    for row_format in FORMATS.values():
        for key in row_format.keys:
            if close := _close_keys(key, candidates, row):
                return f"{close[0]}: unknown key, did you mean {key}?"
    return ""


def _missing_key_hint(row: Mapping[str, Any]) -> str:
    """Returns a hint for a row that has only one of the two keys that a format needs."""
    for row_format in FORMATS.values():
        for key, missing in zip(row_format.keys, row_format.keys[::-1], strict=True):
            if key in row and missing not in row:
                return f"the row has {key} but no {missing}"
    return ""


def _list_hint(object_lists: Sequence[str], turn_lists: Sequence[str]) -> str:
    """Returns a hint for an unknown key whose value is a list of turns or of rows."""
    if turn_lists:
        return f"{turn_lists[0]} is a list of turns: data.columns: {{messages: {turn_lists[0]}}}"
    if object_lists:
        return (
            f"no known format in the keys; {object_lists[0]} is a list of objects: if these are the"
            " rows, give a file that is that list alone"
        )
    return ""


def column_hint(key: str, column: str, row: Mapping[str, Any]) -> str:
    """Returns a hint for an entry `KEY: COLUMN` of `data.columns` if the row does not have this
    column.
    """
    names = [name for name in row if isinstance(name, str)]
    close = difflib.get_close_matches(column.lower(), names, n=1, cutoff=0.75)
    if close:
        return f", but {close[0]!r}: data.columns.{key}: {close[0]}"
    return f" (data.columns.{key}) among {list_keys(row)}"


def suggest_key(key: str, row: Mapping[str, Any]) -> str:
    """Returns `, but 'promt': did you mean prompt?` if the row has a similar key, else an empty
    text.
    """
    close = _close_keys(key, list(row), row)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


def list_keys(row: Mapping[str, Any]) -> str:
    """Returns a text with the first keys of a row, for a message."""
    return ", ".join(list(row)[:6]) or "none"


def _close_keys(key: str, candidates: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """Returns a list with the candidate whose spelling is most similar to `key`, or an empty list.

    For `messages` and `conversations`, only candidates whose value in the row may be a list are
    considered. If a key `message` contains a text, the user did not mean `messages`.
    """
    if key in ("messages", "conversations"):
        candidates = [name for name in candidates if _may_be_list(row[name])]
    return difflib.get_close_matches(key, candidates, n=1, cutoff=0.75)


def _may_be_list(value: Any) -> bool:
    """Returns True if a value is a list, or a text that begins like a JSON list."""
    return isinstance(value, list) or str(value).lstrip().startswith("[")
