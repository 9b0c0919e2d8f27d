"""Detects the format of rows and checks every row. The formats are messages, ShareGPT, Alpaca,
prompt and completion, preference pair, labelled answer, and text.

A format is recognised by the keys of the first row. Other keys (`id`, `source`) are not used;
data.json names and counts them. A checked row of any format becomes an `Example`: a conversation, a
prompt with its completion, or a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import UsageError
from .bad_rows import EmptyAnswer, RowError
from .conversations import (
    Message,
    add_system_prompt,
    chat_messages,
    is_learnt,
    json_kind,
    parse_json_cell,
    read_tools,
    refuse_cut_thoughts,
    sharegpt_messages,
    take_pictures,
)
from .key_hints import column_hint, list_keys, suggest_key, unknown_row_hint
from .read import Record
from .row_keys import (
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    FORMATS,
    PICTURE_KEYS,
    PREFERENCE_KEYS,
    SCORE_KEYS,
    TURN_KEYS,
    Columns,
    FormatName,
)
from .verdicts import LEARN_LABELS_FIX, refuse_unwanted_answer

_LEARN_PAIRS_FIX = "train.objective=dpo learns from pairs (docs/preferences.md)"


@dataclass(frozen=True, slots=True)
class JudgedFormat:
    """A format of judged answers (pairs or labels), which only some objectives read.

    keys  the keys by which the format is recognised
    noun  names its rows in messages
    rows  describes in messages what a row must have
    fix   names the objective that reads it, for messages
    """

    keys: tuple[str, ...]
    noun: str
    rows: str
    fix: str


_JUDGED_FORMATS: Mapping[FormatName, JudgedFormat] = {
    "preference": JudgedFormat(
        PREFERENCE_KEYS,
        "pairs of answers",
        "rows with prompt, chosen and rejected, chosen and rejected conversations, or prompt,"
        " completions and scores",
        _LEARN_PAIRS_FIX,
    ),
    "labelled": JudgedFormat(
        ("label",),
        "answers with a label",
        "rows with prompt, completion and label, which is true or false",
        LEARN_LABELS_FIX,
    ),
}
_LABEL_VALUES: Mapping[Any, bool] = {
    True: True,
    False: False,
    "true": True,
    "false": False,
    "1": True,
    "0": False,
}


@dataclass(frozen=True, slots=True)
class Example:
    """One checked row of a data file, before tokenisation. Exactly one of `messages`, `completion`,
    `text` is set.
    """

    location: str
    messages: tuple[Message, ...] | None = None
    tools: Any = None
    prompt: str = ""
    completion: str | None = None
    text: str | None = None
    learn_from: int = 0
    """Position in `messages` from which answers are learnt; earlier messages are the prompt."""
    pictures: tuple[Any, ...] = ()
    """The pictures of `messages`, in the order of their parts: paths, bytes, or the other forms in
    which a row can give a picture.
    """
    folder: str = "."
    """The folder to which the paths of pictures are relative."""
    rejected: Example | None = None
    """In a preference pair, this example has the chosen answer, and `rejected` is the same prompt
    with the rejected answer.
    """
    is_wanted: bool = True
    """The label of a labelled answer. True for all other answers."""


def detect_format(
    record: Record,
    requested: FormatName | Literal["auto"],
    columns: Columns = None,
    *,
    objective_format: FormatName | None = None,
) -> tuple[FormatName, str]:
    """Returns the format of a file, detected from its first row, and the reason.

    requested         `data.format`
    objective_format  the only format that the run's objective learns from, or None
    Raises            UsageError for a format that cannot be used here, RowError for a row without a
                      known format
    """
    _refuse_table(record)
    row = rename_columns(record, columns)
    if objective_format is not None:
        keys = _check_objective_format(row, requested, objective_format, record.location)
        return (
            objective_format,
            f"the first row ({record.location}) has {_describe_keys(keys, columns)}",
        )
    if requested in _JUDGED_FORMATS:
        raise UsageError(
            f"data.format: {requested} has no effect: the run learns one answer a row",
            fix=_JUDGED_FORMATS[requested].fix,  # type: ignore[index]  # it is one of its keys
        )
    if requested != "auto":
        _require_keys(row, requested, record.location)
        return requested, f"data.format is {requested}"
    name = _match_format(row, record.location)
    keys = FORMATS[name].keys
    noun = "keys" if len(keys) > 1 else "key"
    return name, (
        f"the first row ({record.location}) has the {noun} {_describe_keys(keys, columns)}"
    )


def _check_objective_format(
    row: dict[str, Any],
    requested: FormatName | Literal["auto"],
    objective_format: FormatName,
    location: str,
) -> Sequence[str]:
    """Returns the keys that show that a row has the objective's format. Raises UsageError for a row
    of another format.
    """
    if objective_format == "preference":
        checked_row = _pair_from_scores(row, location)
    else:
        checked_row = row
    format_keys = _JUDGED_FORMATS[objective_format].keys
    if requested not in ("auto", objective_format):
        refuse_other_format(objective_format, f"data.format: {requested}")
    if not any(key in checked_row for key in format_keys):
        refuse_other_format(objective_format, f"{location}: the row has {list_keys(checked_row)}")
    _require_keys(checked_row, objective_format, location)
    if checked_row is row:
        return format_keys
    return [key for key in (*ANSWER_KEYS, *SCORE_KEYS) if key in row]


def _match_format(row: Mapping[str, Any], location: str) -> FormatName:
    """Returns the only format whose keys the row has, for objectives that learn every answer.
    Raises UsageError for none or several.
    """
    matches = [
        name
        for name, row_format in FORMATS.items()
        if name not in _JUDGED_FORMATS and row.keys() >= set(row_format.keys)
    ]
    preferences = [key for key in PREFERENCE_KEYS if key in row]
    if len(preferences) == 2 or (preferences and not matches):
        raise UsageError(
            f"{location}: the row has {' and '.join(preferences)}: preference pairs, and a run"
            " learns one answer a row",
            fix=(
                f"{_LEARN_PAIRS_FIX}; to learn the chosen answers alone: data.columns: {{completion:"
                " chosen}, or {messages: chosen} where it is a conversation"
            ),
        )
    if len(matches) > 1:
        names = " and ".join(", ".join(FORMATS[name].keys) for name in matches)
        raise UsageError(
            f"{location}: the row has {names}: set data.format to {' or '.join(matches)}"
        )
    if "role" in row and matches in ([], ["text"]):
        raise RowError(
            f"{location}: the row has {list_keys(row)}: one turn of a conversation, and a row"
            " holds a whole one",
            fix=(
                '{"messages": [{"role": "user", "content": ...}, ...]}; data.format: text learns'
                " every text by itself"
            ),
        )
    if not matches:
        raise RowError(f"{location}: {unknown_row_hint(row)}")
    return matches[0]


def _refuse_table(record: Record) -> None:
    """Raises UsageError if the first value of a file is a whole table by columns, as pandas'
    `to_json()` writes it.
    """
    columns = record.value.values() if isinstance(record.value, dict) else ()
    if columns and all(
        isinstance(column, dict) and column and all(key.isdecimal() for key in column)
        for column in columns
    ):
        raise UsageError(
            f"{record.location}: one table, as pandas' to_json() writes it, and each row must be an"
            " object",
            fix='to_json("rows.jsonl", orient="records", lines=True)',
        )


def refuse_other_format(objective_format: FormatName, subject: str) -> NoReturn:
    """Raises UsageError for data of another format in a run whose objective learns from `objective_format`."""
    expected = _JUDGED_FORMATS[objective_format]
    other_objectives = "; ".join(
        other.fix for name, other in _JUDGED_FORMATS.items() if name != objective_format
    )
    raise UsageError(
        f"{subject}, and train.objective learns from {expected.noun}",
        fix=(
            f"{expected.rows}; data.columns names keys that are called otherwise; train.objective:"
            f" sft learns answers; {other_objectives}"
        ),
    )


def _describe_keys(keys: Sequence[str], columns: Columns) -> str:
    """Lists the keys of a format, each with the row's name for it."""
    names = columns or {}
    return " and ".join(
        f"{names[key]} (read as {key})" if names.get(key, key) != key else key for key in keys
    )


def rename_columns(record: Record, columns: Columns) -> dict[str, Any]:
    """Returns the row with its keys renamed as `data.columns` says. A renamed key replaces a key of
    the row with the same name.
    """
    if record.error:
        raise RowError(f"{record.location}: {record.error}")
    if not isinstance(record.value, dict):
        if isinstance(record.value, list):
            fix = 'name the values of each row: pandas writes them so with orient="records"'
        else:
            fix = None
        raise RowError(
            f"{record.location}: a row must be an object with keys, got {json_kind(record.value)}",
            fix=fix,
        )
    if not columns:
        return record.value
    row = {
        key: value
        for key, value in record.value.items()
        if key not in columns.values() and key not in columns
    }
    for key, column in columns.items():
        if column is None:  # `data.columns: {KEY: null}`: the key is not read
            continue
        if key not in (
            known_keys := {
                key
                for row_format in FORMATS.values()
                for key in row_format.keys + row_format.optional_keys
            }
        ):
            raise UsageError(
                f"data.columns.{key}: unknown key: one of {', '.join(sorted(known_keys))}"
            )
        if column not in record.value:
            raise RowError(
                f"{record.location}: no key {column!r}{column_hint(key, column, record.value)}"
            )
        row[key] = record.value[column]
    return row


def _pair_from_scores(row: dict[str, Any], location: str) -> dict[str, Any]:
    """Turns a row of several answers with scores into a preference pair of the answers with the
    highest and the lowest score. The first one wins a tie.
    """
    answers, scores = (
        next((key for key in names if key in row), "") for names in (ANSWER_KEYS, SCORE_KEYS)
    )
    if not answers or not scores or any(key in row for key in PREFERENCE_KEYS):
        return row
    answer_list, score_list = (
        parse_json_cell(row[key], f"{location}: {key}") for key in (answers, scores)
    )
    if (
        not isinstance(answer_list, list)
        or not isinstance(score_list, list)
        or len(answer_list) != len(score_list)
        or len(score_list) < 2
    ):
        lengths = [
            f"{len(value)}" if isinstance(value, list) else json_kind(value)
            for value in (answer_list, score_list)
        ]
        raise RowError(
            f"{location}: {answers} and {scores} must be lists of the same length, 2 or more: got"
            f" {lengths[0]} and {lengths[1]}"
        )
    if not all(
        isinstance(score, int | float)
        and not isinstance(score, bool)
        and -math.inf < score < math.inf
        for score in score_list
    ):
        raise RowError(
            f"{location}: {scores} must be numbers, got {json.dumps(score_list, default=str)}"
        )
    if max(score_list) == min(score_list):
        raise RowError(
            f"{location}: all {scores} are {score_list[0]}: no answer is better than another"
        )
    best, worst = (answer_list[score_list.index(extreme(score_list))] for extreme in (max, min))
    return {
        **{key: value for key, value in row.items() if key not in (answers, scores)},
        "chosen": best,
        "rejected": worst,
    }


def check_example(
    record: Record, name: FormatName, *, needs_answer: bool, columns: Columns = None
) -> Example:
    """Checks one row and returns it as an example. `needs_answer`: the loss is on answers only, so
    that a row without an answer is an error.
    """
    row = rename_columns(record, columns)
    if name == "preference":
        row = _pair_from_scores(row, record.location)
    _require_keys(row, name, record.location)
    if name not in _JUDGED_FORMATS:
        refuse_unwanted_answer(row, record.location, has_answer=name != "text")
    checked = _check_row(row, name, record.location, needs_answer=needs_answer)
    _refuse_cut_answers(checked)
    return _add_pictures(checked, row, name, record)


def _refuse_cut_answers(example: Example) -> None:
    """Raises RowError if a learnt answer ends inside its thoughts. Unwanted and rejected answers
    may end there.
    """
    if not example.is_wanted:
        return
    refuse_cut_thoughts(example.completion, f"{example.location}: the answer")
    for i, message in enumerate(example.messages or ()):
        is_answer = message["role"] == "assistant" and i >= example.learn_from
        if is_answer and is_learnt(message):
            refuse_cut_thoughts(message["content"], f"{example.location}: messages[{i}].content")


def _check_row(
    row: Mapping[str, Any], name: FormatName, location: str, *, needs_answer: bool
) -> Example:
    if name == "text":
        return Example(location, text=_check_text(row["text"], "text", location))
    if name == "alpaca":
        return Example(
            location, messages=_alpaca_messages(row, location), tools=read_tools(row, location)
        )
    if name == "prompt_completion":
        return _pair_example(row, location)
    if name == "preference":
        return _preference_example(row, location)
    if name == "labelled":
        return replace(_pair_example(row, location), is_wanted=_parse_label(row["label"], location))
    if name == "messages":
        key = "messages"
        messages = chat_messages(row[key], key, location)
    else:
        key = "conversations"
        messages = sharegpt_messages(row[key], key, location)
    messages = add_system_prompt(messages, row.get("system"), location)
    if needs_answer and not any(m["role"] == "assistant" for m in messages):
        raise RowError(f"{location}: {key} has no assistant turn: the row has no target")
    return Example(location, messages=messages, tools=read_tools(row, location))


def _add_pictures(
    example: Example, row: Mapping[str, Any], name: FormatName, record: Record
) -> Example:
    """Adds the pictures of the row to the example."""
    if example.messages is None:
        return example
    if name in _JUDGED_FORMATS:
        sides = (example, example.rejected)
        turns = [turn for side in sides if side is not None for turn in side.messages or ()]
        in_turns = any(not isinstance(turn["content"], str) for turn in turns)
        if in_turns or _has_any_key(row, PICTURE_KEYS):
            raise RowError(
                f"{record.location}: pictures in {_JUDGED_FORMATS[name].noun} are not offered",
                fix="train.objective: sft learns rows with pictures",
            )
        return example
    messages, pictures = take_pictures(example.messages, row, record.location)
    if pictures:
        return replace(
            example, messages=messages, pictures=pictures, folder=str(Path(record.file).parent)
        )
    return example


def _has_any_key(row: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(row.get(key) not in (None, "", [], "[]") for key in keys)


def ignored_keys(row: Mapping[str, Any], name: FormatName, columns: Columns = None) -> list[str]:
    """Returns the keys of a row that are not used."""
    columns = columns or {}
    used = set(FORMATS[name].keys + FORMATS[name].optional_keys) - set(columns) | set(
        columns.values()
    )
    used |= {key for key, column in columns.items() if column is None}
    return [key for key in row if key not in used]


def _preference_example(row: Mapping[str, Any], location: str) -> Example:
    """Returns a prompt with a chosen and a rejected answer. If both are conversations, their common
    first turns belong to the prompt. The row's prompt is not added again if these turns contain it.
    """
    prompt, chosen, rejected = (
        _turns_or_text(row.get(key), f"{location}: {key}") for key in ("prompt", *PREFERENCE_KEYS)
    )
    if chosen == rejected and chosen:
        raise RowError(f"{location}: chosen and rejected are the same: the pair teaches nothing")
    for key, value in zip(PREFERENCE_KEYS, (chosen, rejected)):
        if not value:
            raise EmptyAnswer(f"{location}: {key} is empty: the row has no target")
    if isinstance(chosen, list) and isinstance(rejected, list):
        common = next(
            (i for i, (first, second) in enumerate(zip(chosen, rejected)) if first != second),
            min(len(chosen), len(rejected)),
        )
        first_turns = chosen[:common]
        if isinstance(prompt, str):
            is_in_turns = not prompt.strip() or any(
                isinstance(turn, dict) and turn.get("content") == prompt for turn in first_turns
            )
            prompt = [] if is_in_turns else [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and first_turns[: len(prompt)] == prompt:
            prompt = []
        prompt = [*(prompt or []), *first_turns]
        chosen = chosen[common:]
        rejected = rejected[common:]
        if not chosen or not rejected:
            raise RowError(
                f"{location}: one of chosen and rejected is the beginning of the other: it has no"
                " answer of its own"
            )
    elif prompt is None:
        raise RowError(
            f"{location}: no key 'prompt': chosen and rejected as text need it; write what both answer"
            " as prompt"
        )
    conversation_values = {key: row.get(key) for key in CONVERSATION_KEYS}
    sides = {
        key: {**conversation_values, "prompt": prompt, key: value}
        for key, value in zip(PREFERENCE_KEYS, (chosen, rejected))
    }
    return replace(
        _pair_example(sides["chosen"], location, "chosen"),
        rejected=_pair_example(sides["rejected"], location, "rejected"),
    )


def _parse_label(value: Any, location: str) -> bool:
    if isinstance(value, str | int):
        label = _LABEL_VALUES.get(value.strip().casefold() if isinstance(value, str) else value)
    else:
        label = None
    if label is None:
        raise RowError(
            f"{location}: label must be true or false, got {json.dumps(value, default=str)}"
        )
    return label


def _pair_example(row: Mapping[str, Any], location: str, answer: str = "completion") -> Example:
    """Returns an example of a prompt and its completion. Both are texts, or both are messages, of
    which only the completion's are learnt. Texts become messages if the row has a system prompt,
    tools or pictures. `answer`: the row's key of the completion.
    """
    prompt, completion = (
        _turns_or_text(row[key], f"{location}: {key}") for key in ("prompt", answer)
    )
    if isinstance(prompt, list) != isinstance(completion, list):
        message = f"prompt and {answer} must both be text, or both lists of messages"
        raise RowError(
            f"{location}: {message}: prompt is {json_kind(prompt)}, {answer} {json_kind(completion)}"
        )
    if isinstance(prompt, list):
        prompt_turns = chat_messages(prompt, "prompt", location, may_be_empty=True)
        answer_turns = chat_messages(completion, answer, location)
        if not any(m["role"] == "assistant" for m in answer_turns):
            raise RowError(f"{location}: {answer} has no assistant turn: the row has no target")
    else:
        prompt = _check_text(row["prompt"], "prompt", location, may_be_empty=True)
        completion = _check_answer(row[answer], answer, location)
        if not _has_any_key(row, CONVERSATION_KEYS):
            return Example(location, prompt=prompt, completion=completion)
        prompt_turns = ({"role": "user", "content": prompt},)
        answer_turns = ({"role": "assistant", "content": completion},)
    prompt_turns = add_system_prompt(prompt_turns, row.get("system"), location)
    return Example(
        location,
        messages=prompt_turns + answer_turns,
        tools=read_tools(row, location),
        learn_from=len(prompt_turns),
    )


def _turns_or_text(value: Any, path: str) -> Any:
    """Parses a table's cell that contains a list of messages as JSON. Other values are returned
    unchanged, also an answer that is a JSON list of something else.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    turns = parse_json_cell(value, path)
    is_list = isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns)
    if is_list and any((TURN_KEYS | {"content"}) & turn.keys() for turn in turns):
        return turns
    return value


def _alpaca_messages(row: Mapping[str, Any], location: str) -> tuple[Message, ...]:
    instruction = _check_text(row["instruction"], "instruction", location, may_be_empty=True)
    input_text = _check_text(row.get("input") or "", "input", location, may_be_empty=True)
    question_text = "\n\n".join(part for part in (instruction, input_text) if part.strip())
    if not question_text:
        raise RowError(f"{location}: instruction and input are both empty")
    output = _check_answer(row["output"], "output", location)
    history = parse_json_cell(row.get("history"), f"{location}: history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in history
    ):
        raise RowError(f"{location}: history must be a list of [question, answer]")
    messages = list(add_system_prompt((), row.get("system"), location))
    for i, (question, answer) in enumerate(history):
        messages.append(
            {"role": "user", "content": _check_text(question, f"history[{i}][0]", location)}
        )
        messages.append(
            {"role": "assistant", "content": _check_text(answer, f"history[{i}][1]", location)}
        )
    return (
        *messages,
        {"role": "user", "content": question_text},
        {"role": "assistant", "content": output},
    )


def _require_keys(row: Mapping[str, Any], name: FormatName, location: str) -> None:
    missing = next((key for key in FORMATS[name].keys if key not in row), None)
    if missing is None:
        return
    other_format = next(
        (
            n
            for n, row_format in FORMATS.items()
            if n != name and all(key in row for key in row_format.keys)
        ),
        None,
    )
    if other_format:
        raise RowError(
            f"{location}: the row is {other_format}, but the file is read as {name}: one file holds one"
            " format"
        )
    raise RowError(
        f"{location}: no key {missing!r}{suggest_key(missing, row)} (the file is read as {name})"
    )


def _check_answer(value: Any, key: str, location: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise EmptyAnswer(f"{location}: {key} is empty: the row has no target")
    return _check_text(value, key, location)


def _check_text(value: Any, key: str, location: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RowError(f"{location}: {key} must be text, got {json_kind(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{location}: {key} is empty")
    return value
