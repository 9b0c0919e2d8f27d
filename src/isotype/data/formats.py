"""Detects the format of rows and checks every row. The formats are messages, ShareGPT, Alpaca,
prompt and completion, preference pair, labelled answer, and text.

A format is recognised by the keys of the first row. Other keys, such as `id` and `source`, are not
used; data.json lists them with their counts. After the check, a row of any format becomes an
`Example`. An example is a conversation, a prompt with its completion, or a text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..config.yaml_text import write_value
from ..errors import UsageError
from .answer_labels import LEARN_LABELS_FIX, parse_answer_label, refuse_unwanted_answer
from .bad_rows import EmptyAnswer, NoLabel, RowError
from .columns import NamedRow, describe_name, rename_row, used_names
from .conversations import (
    Message,
    add_system_prompt,
    convert_chat_messages,
    convert_sharegpt_messages,
    describe_json_type,
    extract_pictures,
    is_learnt,
    is_sharegpt,
    parse_json_cell,
    read_tools,
    refuse_cut_thoughts,
)
from .key_hints import (
    column_hint,
    columns_for_chosen_answer,
    list_keys,
    preference_or_label_hint,
    suggest_key,
    unknown_row_hint,
)
from .read import Record
from .row_keys import (
    ALPACA_OPTIONAL_KEYS,
    ANSWER_KEYS,
    CONVERSATION_KEYS,
    FORMATS,
    PAIR_PROMPT_KEYS,
    PICTURE_KEYS,
    PREFERENCE_KEYS,
    SCORE_KEYS,
    TURN_KEYS,
    Columns,
    FormatName,
    Roles,
    labelled_format,
)

_LEARN_PAIRS_FIX = "train.objective=dpo learns from pairs (docs/preferences.md)"


@dataclass(frozen=True, slots=True)
class JudgedFormat:
    """Describes a format that says which answers are good: preference pairs, or answers with
    labels. Only some objectives read these formats.

    keys  the keys by which the format is recognised
    noun  the word for a row of this format in messages
    rows  a description of what a row must have, for messages
    fix   for messages: the advice to use the objective that reads this format
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
        "rows with prompt, completion and label, which is true or false, or messages and label",
        LEARN_LABELS_FIX,
    ),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One checked row of a data file, before tokenisation. Exactly one of `messages`, `completion`,
    `text` is set.

    location  the file and line of the row, for messages
    prompt    the text before `completion`
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
    roles: Roles = None,
    objective_format: FormatName | None = None,
) -> tuple[FormatName, str]:
    """Returns the format of a file, which is detected from the file's first row, and the reason for
    this choice.

    requested         `data.format`
    objective_format  the only format that the run's objective learns from, or None
    Raises            UsageError for a format that cannot be used here, RowError for a row without a
                      known format
    """
    _refuse_table(record)
    if requested == "auto":
        row_format = objective_format
    else:
        row_format = requested
    named_row = rename_row(record, columns, roles, row_format=row_format)
    row = named_row.values
    if objective_format is not None:
        keys = _check_objective_format(named_row, requested, objective_format, record, columns)
        return objective_format, _format_reason(keys, named_row, record.location)
    if requested in _JUDGED_FORMATS:
        raise UsageError(
            f"data.format: {requested} has no effect: the run learns one answer a row",
            fix=_JUDGED_FORMATS[requested].fix,  # type: ignore[index]  # it is one of its keys
        )
    if requested != "auto":
        _require_keys(row, requested, record.location)
        return requested, f"data.format is {requested}"
    name = _match_format(row, record.location)
    return name, _format_reason(FORMATS[name].keys, named_row, record.location)


def _format_reason(keys: Sequence[str], row: NamedRow, location: str) -> str:
    """Returns a text that says which keys of the first row identify its format, and which of its
    keys have other names in the file.
    """
    noun = "keys" if len(keys) > 1 else "key"
    described = " and ".join(describe_name(key, row.names) for key in keys)
    others = [describe_name(key, row.names) for key in row.names if key not in keys]
    beside = f", beside {', '.join(others)}" if others else ""
    return f"the first row ({location}) has the {noun} {described}{beside}"


def _check_objective_format(
    named_row: NamedRow,
    requested: FormatName | Literal["auto"],
    objective_format: FormatName,
    record: Record,
    columns: Columns,
) -> Sequence[str]:
    """Checks that a row has the format that the objective requires, and returns the keys that show
    this. Raises UsageError if the configuration sets another format (`data.format`). Raises
    RowError if the row does not have these keys.
    """
    row = named_row.values
    location = record.location
    if objective_format == "preference":
        checked_row = _pair_from_scores(row, location)
    else:
        checked_row = row
    format_keys = _JUDGED_FORMATS[objective_format].keys
    if requested not in ("auto", objective_format):
        refuse_other_format(objective_format, f"data.format: {requested}")
    if not any(key in checked_row for key in format_keys):
        column = (columns or {}).get("label")
        if objective_format == "labelled" and column is not None:
            raise RowError(f"{location}: no key {column!r}{column_hint('label', column, row)}")
        refuse_other_format(
            objective_format,
            f"{location}: the row has {list_keys(checked_row)}",
            hint=preference_or_label_hint(row, objective_format),
            error_class=RowError,
        )
    _require_keys(checked_row, objective_format, location)
    if objective_format == "labelled":
        inner_format = labelled_format(row)
        return () if inner_format is None else (*FORMATS[inner_format].keys, "label")
    if checked_row is row:
        sides = [_answer_value(row[key], location, None) for key in PREFERENCE_KEYS]
        if _pair_prompt_key(row) is None and all(isinstance(side, str) for side in sides):
            raise _missing_prompt(row, location)
        return format_keys
    return [key for key in (*ANSWER_KEYS, *SCORE_KEYS) if key in row]


def _match_format(row: Mapping[str, Any], location: str) -> FormatName:
    """Returns the format whose keys the row has. This function is used for objectives that train on
    every answer. Raises UsageError if the row has the keys of no format, or the keys of several
    formats.
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
                f"{_LEARN_PAIRS_FIX}; to learn the chosen answers alone: data.columns:"
                f" {write_value(columns_for_chosen_answer(row))}"
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
    """Raises UsageError if the first value of a file is a whole table, stored by columns, as
    pandas' `to_json()` writes it.
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


def refuse_other_format(
    objective_format: FormatName,
    subject: str,
    *,
    hint: str = "",
    error_class: type[UsageError] = UsageError,
) -> NoReturn:
    """Raises `error_class` for data of another format in a run whose objective learns from
    `objective_format`.

    hint  advice for this row
    """
    expected = _JUDGED_FORMATS[objective_format]
    other_objectives = "; ".join(
        other.fix for name, other in _JUDGED_FORMATS.items() if name != objective_format
    )
    columns_fix = hint or "data.columns names keys that are called otherwise"
    raise error_class(
        f"{subject}, and train.objective learns from {expected.noun}",
        fix=(
            f"{expected.rows}; {columns_fix}; train.objective: sft learns answers;"
            f" {other_objectives}"
        ),
    )


def _pair_from_scores(row: dict[str, Any], location: str) -> dict[str, Any]:
    """Converts a row of several answers with scores into a preference pair. The pair consists of
    the answers with the highest and the lowest score. If two answers have the same score, the first
    answer is used.
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
            f"{len(value)}" if isinstance(value, list) else describe_json_type(value)
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
    record: Record,
    name: FormatName,
    *,
    needs_answer: bool,
    columns: Columns = None,
    roles: Roles = None,
) -> Example:
    """Checks one row and returns it as an example. If `needs_answer` is true, the loss is computed
    on answers only, and a row without an answer is an error.
    """
    row = rename_row(record, columns, roles, row_format=name).values
    if name == "preference":
        row = _pair_from_scores(row, record.location)
    _require_keys(row, name, record.location)
    if name not in _JUDGED_FORMATS:
        refuse_unwanted_answer(row, record.location, has_answer=name != "text")
    checked = _check_row(row, name, record.location, needs_answer=needs_answer)
    _refuse_cut_answers(checked)
    return _add_pictures(checked, row, name, record)


def _refuse_cut_answers(example: Example) -> None:
    """Raises RowError if an answer that the model learns ends before its thoughts are complete.
    Unwanted and rejected answers may end before their thoughts are complete.
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
        return _labelled_example(row, location)
    if name == "messages":
        key = "messages"
        messages = convert_chat_messages(row[key], key, location)
    else:
        key = "conversations"
        messages = convert_sharegpt_messages(row[key], key, location)
    messages = add_system_prompt(messages, row.get("system"), location)
    if needs_answer and not any(message["role"] == "assistant" for message in messages):
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
    messages, pictures = extract_pictures(example.messages, row, record.location)
    if pictures:
        return replace(
            example, messages=messages, pictures=pictures, folder=str(Path(record.file).parent)
        )
    return example


def _has_any_key(row: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(row.get(key) not in (None, "", [], "[]") for key in keys)


def ignored_keys(
    row: Mapping[str, Any], name: FormatName, columns: Columns = None, roles: Roles = None
) -> list[str]:
    """Returns the keys of a row that Isotype does not use."""
    named_row = rename_row(Record("", 0, row), columns, roles, row_format=name)
    hidden = {key for key, column in (columns or {}).items() if column is None}
    used = (_read_keys(named_row.values, name) - named_row.names.keys()) | hidden
    used |= used_names(named_row)
    return [key for key in row if key not in used]


def _read_keys(row: Mapping[str, Any], name: FormatName) -> set[str]:
    """Returns the keys of this row that the format reads."""
    row_format = FORMATS[name]
    keys = {*row_format.keys, *row_format.optional_keys}
    if name == "labelled" and (inner_format := labelled_format(row)) is not None:
        keys |= {*FORMATS[inner_format].keys, *FORMATS[inner_format].optional_keys}
    if name == "preference" and (key := _pair_prompt_key(row)) is not None:
        keys |= {key, *(ALPACA_OPTIONAL_KEYS if key == "instruction" else ())}
    return keys


def _pair_prompt_key(row: Mapping[str, Any]) -> str | None:
    """Returns the key that holds the prompt of a pair; None if the answers contain it."""
    key = next((key for key in PAIR_PROMPT_KEYS if key in row), None)
    if key in (None, "prompt"):
        return key
    chosen = _turns_or_text(row.get("chosen"), "chosen")
    is_conversation = isinstance(chosen, list) and len(chosen) > 1
    return None if is_conversation or not _is_prompt(row[key]) else key


def _is_prompt(value: Any) -> bool:
    """Returns True if a value is text, or a list of turns that does not end with an answer."""
    turns = _turns_or_text(value, "")
    if not isinstance(turns, list):
        return isinstance(turns, str)
    last = turns[-1] if turns else None
    if not isinstance(last, dict):
        return False
    return last.get("role", last.get("from")) not in ("assistant", "gpt")


def _pair_prompt(row: Mapping[str, Any], location: str) -> Any:
    """Returns the prompt of a pair, as text or turns; None if the answers contain it."""
    key = _pair_prompt_key(row)
    if key == "instruction":
        turns = _question_messages(row, location)
        return turns[0]["content"] if len(turns) == 1 else list(turns)
    return None if key is None else _turns_or_text(row[key], f"{location}: {key}")


# the beginnings of turns in a text that contains a whole dialogue; each follows a blank line
_DIALOGUE_TURN = re.compile(r"(?:\A\s*|\n\s*\n)(Human|User|Assistant|System):[ \t]?")
# the names of speakers in a dialogue that is one text -> roles
_DIALOGUE_ROLES = {
    "Human": "user",
    "User": "user",
    "Assistant": "assistant",
    "System": "system",
}


def _split_dialogue(text: Any) -> Any:
    """Splits a text such as `Human: ... Assistant: ...` into turns. Returns any other value
    unchanged.
    """
    if not isinstance(text, str):
        return text
    marks = list(_DIALOGUE_TURN.finditer(text))
    if len(marks) < 2 or text[: marks[0].start()].strip():
        return text
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _DIALOGUE_ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _preference_example(row: Mapping[str, Any], location: str) -> Example:
    """Returns a prompt with a chosen and a rejected answer. If both answers are conversations, the
    first turns that are the same in both become the prompt. If these turns already contain the
    row's prompt, it is not added again.
    """
    prompt = _pair_prompt(row, location)
    if not isinstance(prompt, str | list | None):
        raise RowError(
            f"{location}: prompt must be text or a list of messages, got {describe_json_type(prompt)}"
        )
    chosen, rejected = (
        _answer_value(row[key], f"{location}: {key}", prompt) for key in PREFERENCE_KEYS
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
                isinstance(turn, dict) and turn.get("content", turn.get("value")) == prompt
                for turn in first_turns
            )
            prompt = [] if is_in_turns else [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and first_turns[: len(prompt)] == prompt:
            prompt = []
        prompt = [*_as_messages(prompt or [], location), *_as_messages(first_turns, location)]
        chosen = chosen[common:]
        rejected = rejected[common:]
        if not chosen or not rejected:
            raise RowError(
                f"{location}: one of chosen and rejected is the beginning of the other: it has no"
                " answer of its own"
            )
    elif prompt is None:
        raise _missing_prompt(row, location)
    conversation_values = {key: row.get(key) for key in CONVERSATION_KEYS}
    sides = {
        key: {**conversation_values, "prompt": prompt, key: value}
        for key, value in zip(PREFERENCE_KEYS, (chosen, rejected))
    }
    return replace(
        _pair_example(sides["chosen"], location, "chosen"),
        rejected=_pair_example(sides["rejected"], location, "rejected"),
    )


def _missing_prompt(row: Mapping[str, Any], location: str) -> RowError:
    hint = preference_or_label_hint(row, "preference") or "write what both answer as prompt"
    return RowError(
        f"{location}: no key 'prompt': chosen and rejected as text need it; {hint}",
    )


def _answer_value(value: Any, path: str, prompt: Any) -> Any:
    """Returns an answer of a pair as text or as a list of turns. A text becomes a turn of the
    assistant if the prompt is a list of turns. If the row has no prompt, the text of the answer may
    contain the whole dialogue.
    """
    answer = _turns_or_text(value, path)
    if isinstance(answer, dict):
        return [answer]
    if isinstance(answer, str) and answer.strip() and isinstance(prompt, list):
        return [{"role": "assistant", "content": answer}]
    return _split_dialogue(answer) if prompt is None else answer


def _as_messages(turns: Sequence[Any], location: str) -> tuple[Any, ...]:
    """Returns the turns of a prompt as messages. Turns in ShareGPT's form are converted."""
    if is_sharegpt(turns):
        return convert_sharegpt_messages(list(turns), "prompt", location)
    return tuple(turns)


def _labelled_example(row: Mapping[str, Any], location: str) -> Example:
    """Returns an answer with its label. The answer is a completion, or the last turn of a
    conversation.
    """
    is_wanted = _parse_label(row.get("label"), location)
    name = labelled_format(row)
    if name == "prompt_completion" or name is None:
        return replace(_pair_example(row, location), is_wanted=is_wanted)
    example = _check_row(row, name, location, needs_answer=True)
    messages = example.messages or ()
    if messages[-1]["role"] != "assistant":
        raise RowError(
            f"{location}: {FORMATS[name].keys[0]} ends with a turn of {messages[-1]['role']}: the label"
            " is about an answer at its end"
        )
    return replace(example, learn_from=len(messages) - 1, is_wanted=is_wanted)


def _parse_label(value: Any, location: str) -> bool:
    if value is None or value == "":
        raise NoLabel(f"{location}: the row has no label")
    label = parse_answer_label(value)
    if label is None:
        raise RowError(
            f"{location}: label must be true or false, got {json.dumps(value, default=str)}"
        )
    return label


def _pair_example(row: Mapping[str, Any], location: str, answer: str = "completion") -> Example:
    """Returns an example that consists of a prompt and its completion. In the example, the prompt
    and the completion are either two texts or two lists of messages. The model learns only the
    completion. Texts become messages if the row has a system prompt, tools or pictures. `answer` is
    the row's key that contains the completion.
    """
    prompt, completion = (
        _turns_or_text(row[key], f"{location}: {key}") for key in ("prompt", answer)
    )
    if isinstance(prompt, list) != isinstance(completion, list):
        message = f"prompt and {answer} must both be text, or both lists of messages"
        raise RowError(
            f"{location}: {message}: prompt is {describe_json_type(prompt)}, {answer} {describe_json_type(completion)}"
        )
    if isinstance(prompt, list):
        prompt_turns = convert_chat_messages(prompt, "prompt", location, may_be_empty=True)
        answer_turns = convert_chat_messages(completion, answer, location)
        if not any(turn["role"] == "assistant" for turn in answer_turns):
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
    """Parses a table's cell if it contains a list of messages as JSON. Returns any other value
    unchanged, even if it is a JSON list of something else.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    turns = parse_json_cell(value, path)
    is_list = isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns)
    if is_list and any((TURN_KEYS | {"content"}) & turn.keys() for turn in turns):
        return turns
    return value


def _alpaca_messages(row: Mapping[str, Any], location: str) -> tuple[Message, ...]:
    output = _check_answer(row["output"], "output", location)
    return (*_question_messages(row, location), {"role": "assistant", "content": output})


def _question_messages(row: Mapping[str, Any], location: str) -> tuple[Message, ...]:
    """Returns the turns before the answer, for a row in Alpaca's format."""
    instruction = _check_text(row["instruction"], "instruction", location, may_be_empty=True)
    input_text = _check_text(row.get("input") or "", "input", location, may_be_empty=True)
    question_text = "\n\n".join(part for part in (instruction, input_text) if part.strip())
    if not question_text:
        raise RowError(f"{location}: instruction and input are both empty")
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
    return (*messages, {"role": "user", "content": question_text})


def _require_keys(row: Mapping[str, Any], name: FormatName, location: str) -> None:
    keys = FORMATS[name].keys
    if name == "labelled":  # a row without a label is left out, and counted
        keys = () if labelled_format(row) else FORMATS["prompt_completion"].keys
    missing = next((key for key in keys if key not in row), None)
    if missing is None:
        return
    other_format = next(
        (
            n
            for n, row_format in FORMATS.items()
            if n != name and n not in _JUDGED_FORMATS and all(key in row for key in row_format.keys)
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
        raise RowError(f"{location}: {key} must be text, got {describe_json_type(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{location}: {key} is empty")
    return value
