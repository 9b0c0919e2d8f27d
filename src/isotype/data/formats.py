"""The formats of a row: messages, ShareGPT, Alpaca, prompt and completion, a preference pair, a
labelled answer, or text. Detects the format and checks every row.

A format is recognised by the keys of the first row. Other keys (`id`, `source`) are not used, and
the facts name and count them. A checked row of any format becomes an `Example`: a conversation, a
pair, or a text.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..config.yaml_text import write_value
from ..errors import UsageError
from .bad_rows import EmptyAnswer, RowError
from .conversations import (
    Message,
    chat_messages,
    is_learnt,
    kind,
    parsed_json,
    refuse_cut_thoughts,
    sharegpt_messages,
    take_pictures,
    tool_list,
    with_system,
)
from .read import Record
from .verdicts import LEARN_LABELS, refuse_unwanted_answer

FormatName = Literal[
    "messages", "sharegpt", "alpaca", "prompt_completion", "preference", "labelled", "text"
]
Columns = Mapping[str, str | None] | None


@dataclass(frozen=True, slots=True)
class Format:
    """The keys that a row must have, and those that it may."""

    keys: tuple[str, ...]
    beside: tuple[str, ...] = ()


# of several answers to one prompt, and of their scores: what they are called in RRHF's,
# UltraFeedback's and distilabel's data
_ANSWERS = ("completions", "responses", "generations")
_SCORES = ("scores", "rewards", "ratings")
# keys beside a conversation that every format of one reads, whatever the objective; a plain text is
# whole by itself
_SYSTEM = ("system",)
_TOOLS = ("tools", "functions")
_PICTURES = ("images", "image")
CONVERSATION_KEYS = (*_SYSTEM, *_TOOLS, *_PICTURES)
FORMATS: dict[FormatName, Format] = {
    "messages": Format(("messages",), CONVERSATION_KEYS),
    "sharegpt": Format(("conversations",), CONVERSATION_KEYS),
    "alpaca": Format(("instruction", "output"), ("input", "history", *CONVERSATION_KEYS)),
    "prompt_completion": Format(("prompt", "completion"), CONVERSATION_KEYS),
    "preference": Format(
        ("chosen", "rejected"), ("prompt", *_ANSWERS, *_SCORES, *CONVERSATION_KEYS)
    ),
    "labelled": Format(("prompt", "completion", "label"), CONVERSATION_KEYS),
    "text": Format(("text",)),
}
# keys of data made for other trainings, or whose meaning a person has to say
_PREFERENCES = ("chosen", "rejected")
_PAIRS = (
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"), ("instruction", "response"),
    ("input", "output"), ("prompt", "response"), ("prompt", "answer"), ("source", "target"),
)  # fmt: skip
# what belongs to a question and answer under other names: the keys of Alpaca's format, and what
# they are called elsewhere
_BESIDE_A_PAIR = {
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "history": ("history",),
}
_TURN = {"role", "author", "from", "parts"}
_LEARN_PAIRS = "train.objective=dpo learns from pairs (docs/preferences.md)"
# formats of one kind of objective: the keys by which they are told, their name, what to write, and
# which objective reads them
_JUDGED: Mapping[FormatName, tuple[tuple[str, ...], str, str, str]] = {
    "preference": (
        _PREFERENCES, "pairs of answers",
        "rows with prompt, chosen and rejected, chosen and rejected conversations, or prompt, completions and scores", _LEARN_PAIRS,
    ),
    "labelled": (("label",), "answers with a label", "rows with prompt, completion and label, which is true or false", LEARN_LABELS),
}  # fmt: skip
_LABELS: Mapping[Any, bool] = {
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

    place: str
    messages: tuple[Message, ...] | None = None
    tools: Any = None
    prompt: str = ""
    completion: str | None = None
    text: str | None = None
    learn_from: int = 0
    """Of `messages`: answers before this one are a prompt."""
    pictures: tuple[Any, ...] = ()
    """Of `messages`, in the order of their parts: paths, bytes, or what else a row names a picture
    by.
    """
    folder: str = "."
    """Where the paths of pictures begin."""
    rejected: Example | None = None
    """Of a preference pair, whose chosen answer this is: the same prompt with the rejected one."""
    wanted: bool = True
    """The label of an answer; every other answer is wanted."""


def detect(
    record: Record,
    asked: FormatName | Literal["auto"],
    columns: Columns = None,
    *,
    only: FormatName | None = None,
) -> tuple[FormatName, str]:
    """The format of a file from its first row, and why. `only`: the one format of which the run's
    objective learns.
    """
    _refuse_table(record)
    row = given = renamed(record, columns)
    if only == "preference":
        row = _as_pair(given, record.place)
    if only and (asked not in ("auto", only) or not any(key in row for key in _JUDGED[only][0])):
        refuse_other_than(
            only,
            (
                f"{record.place}: the row has {_listed(row)}"
                if asked in ("auto", only)
                else f"data.format: {asked}"
            ),
        )
    if asked in _JUDGED and not only:
        raise UsageError(
            f"data.format: {asked} has no effect: the run learns one answer a row",
            fix=_JUDGED[asked][3],  # type: ignore[index]  # found among its keys
        )
    if only:
        _require(row, only, record.place)
        keys = (
            _JUDGED[only][0]
            if row is given
            else [key for key in (*_ANSWERS, *_SCORES) if key in given]
        )
        return only, f"the first row ({record.place}) has {_read_as(keys, columns)}"
    if asked != "auto":
        _require(row, asked, record.place)
        return asked, f"data.format is {asked}"
    found = [
        name
        for name, form in FORMATS.items()
        if name not in _JUDGED and all(key in row for key in form.keys)
    ]
    preferences = [key for key in _PREFERENCES if key in row]
    if len(preferences) == 2 or (preferences and not found):
        raise UsageError(
            f"{record.place}: the row has {' and '.join(preferences)}: preference pairs, and a run"
            " learns one answer a row",
            fix=(
                f"{_LEARN_PAIRS}; to learn the chosen answers alone: data.columns: {{completion:"
                " chosen}, or {messages: chosen} where it is a conversation"
            ),
        )
    if len(found) > 1:
        names = " and ".join(", ".join(FORMATS[name].keys) for name in found)
        raise UsageError(
            f"{record.place}: the row has {names}: set data.format to {' or '.join(found)}"
        )
    if "role" in row and found in ([], ["text"]):
        raise RowError(
            f"{record.place}: the row has {_listed(row)}: one turn of a conversation, and a row"
            " holds a whole one",
            fix=(
                '{"messages": [{"role": "user", "content": ...}, ...]}; data.format: text learns'
                " every text by itself"
            ),
        )
    if not found:
        raise RowError(f"{record.place}: {_unknown(row)}")
    keys = FORMATS[found[0]].keys
    return (
        found[0],
        (
            f"the first row ({record.place}) has the {'keys' if len(keys) > 1 else 'key'}"
            f" {_read_as(keys, columns)}"
        ),
    )


def _refuse_table(record: Record) -> None:
    """Raises  UsageError where a file's first value is a whole table by columns, as pandas'
    `to_json()` writes it
    """
    columns = record.value.values() if isinstance(record.value, dict) else ()
    if columns and all(
        isinstance(column, dict) and column and all(key.isdecimal() for key in column)
        for column in columns
    ):
        raise UsageError(
            f"{record.place}: one table, as pandas' to_json() writes it, and each row must be an"
            " object",
            fix='to_json("rows.jsonl", orient="records", lines=True)',
        )


def refuse_other_than(only: FormatName, what: str) -> NoReturn:
    """Raises UsageError for data of another format in a run whose objective learns from `only`."""
    _, name, rows, _ = _JUDGED[only]
    others = "; ".join(learns for form, (*_, learns) in _JUDGED.items() if form != only)
    raise UsageError(
        f"{what}, and train.objective learns from {name}",
        fix=(
            f"{rows}; data.columns names keys that are called otherwise; train.objective: sft"
            f" learns answers; {others}"
        ),
    )


def _read_as(keys: Sequence[str], columns: Columns) -> str:
    """The keys of a format, with what the row calls them."""
    names = columns or {}
    return " and ".join(
        f"{names[key]} (read as {key})" if names.get(key, key) != key else key for key in keys
    )


def renamed(record: Record, columns: Columns) -> dict[str, Any]:
    """The row as an object, its keys as `data.columns` names them. A key that is taken over hides
    one of the same name.
    """
    if record.wrong:
        raise RowError(f"{record.place}: {record.wrong}")
    if not isinstance(record.value, dict):
        if isinstance(record.value, list):
            fix = 'name the values of each row: pandas writes them so with orient="records"'
        else:
            fix = None
        raise RowError(
            f"{record.place}: a row must be an object with keys, got {kind(record.value)}", fix=fix
        )
    if not columns:
        return record.value
    row = {
        key: value
        for key, value in record.value.items()
        if key not in columns.values() and key not in columns
    }
    for ours, theirs in columns.items():
        if theirs is None:  # a key of the data that is not read
            continue
        if ours not in (
            known := {key for form in FORMATS.values() for key in form.keys + form.beside}
        ):
            raise UsageError(f"data.columns.{ours}: unknown key: one of {', '.join(sorted(known))}")
        if theirs not in record.value:
            raise RowError(
                f"{record.place}: no key {theirs!r}{_column(ours, theirs, record.value)}"
            )
        row[ours] = record.value[theirs]
    return row


def _as_pair(row: dict[str, Any], place: str) -> dict[str, Any]:
    """A row of several answers with scores as a pair: the first of those with the highest score,
    and the first of those with the lowest.
    """
    answers, scores = (
        next((key for key in names if key in row), "") for names in (_ANSWERS, _SCORES)
    )
    if not answers or not scores or any(key in row for key in _PREFERENCES):
        return row
    several, given = (parsed_json(row[key], f"{place}: {key}") for key in (answers, scores))
    if (
        not isinstance(several, list)
        or not isinstance(given, list)
        or len(several) != len(given)
        or len(given) < 2
    ):
        shown = [
            f"{len(value)}" if isinstance(value, list) else kind(value)
            for value in (several, given)
        ]
        raise RowError(
            f"{place}: {answers} and {scores} must be lists of the same length, 2 or more: got"
            f" {shown[0]} and {shown[1]}"
        )
    if not all(
        isinstance(one, int | float) and not isinstance(one, bool) and -math.inf < one < math.inf
        for one in given
    ):
        raise RowError(f"{place}: {scores} must be numbers, got {json.dumps(given, default=str)}")
    if max(given) == min(given):
        raise RowError(f"{place}: all {scores} are {given[0]}: no answer is better than another")
    best, worst = (several[given.index(extreme(given))] for extreme in (max, min))
    return {
        **{key: value for key, value in row.items() if key not in (answers, scores)},
        "chosen": best,
        "rejected": worst,
    }


def example(
    record: Record, name: FormatName, *, needs_answer: bool, columns: Columns = None
) -> Example:
    """Checks one row. `needs_answer`: the loss is on answers only, so a row without one is an
    error.
    """
    row = renamed(record, columns)
    if name == "preference":
        row = _as_pair(row, record.place)
    _require(row, name, record.place)
    if name not in _JUDGED:
        refuse_unwanted_answer(row, record.place, has_answer=name != "text")
    checked = _checked(row, name, record.place, needs_answer=needs_answer)
    _refuse_cut_answers(checked)
    return _with_pictures(checked, row, name, record)


def _refuse_cut_answers(found: Example) -> None:
    """Raises RowError where a wanted answer that is learnt ends inside its thoughts; an unwanted or
    rejected one may.
    """
    if not found.wanted:
        return
    refuse_cut_thoughts(found.completion, f"{found.place}: the answer")
    for i, message in enumerate(found.messages or ()):
        is_answer = message["role"] == "assistant" and i >= found.learn_from
        if is_answer and is_learnt(message):
            refuse_cut_thoughts(message["content"], f"{found.place}: messages[{i}].content")


def _checked(
    row: Mapping[str, Any], name: FormatName, place: str, *, needs_answer: bool
) -> Example:
    if name == "text":
        return Example(place, text=_text(row["text"], "text", place))
    if name == "alpaca":
        return Example(place, messages=_alpaca(row, place), tools=tool_list(row, place))
    if name == "prompt_completion":
        return _pair(row, place)
    if name == "preference":
        return _preference(row, place)
    if name == "labelled":
        return replace(_pair(row, place), wanted=_label(row["label"], place))
    if name == "messages":
        key = "messages"
        messages = chat_messages(row[key], key, place)
    else:
        key = "conversations"
        messages = sharegpt_messages(row[key], key, place)
    messages = with_system(messages, row.get("system"), place)
    if needs_answer and not any(m["role"] == "assistant" for m in messages):
        raise RowError(f"{place}: {key} has no assistant turn: the row has no target")
    return Example(place, messages=messages, tools=tool_list(row, place))


def _with_pictures(
    found: Example, row: Mapping[str, Any], name: FormatName, record: Record
) -> Example:
    """The example with the pictures of its row."""
    if found.messages is None:
        return found
    if name in _JUDGED:
        sides = (found, found.rejected)
        turns = [turn for side in sides if side is not None for turn in side.messages or ()]
        in_turns = any(not isinstance(turn["content"], str) for turn in turns)
        if in_turns or _has_any(row, _PICTURES):
            raise RowError(
                f"{record.place}: pictures in {_JUDGED[name][1]} are not offered",
                fix="train.objective: sft learns rows with pictures",
            )
        return found
    messages, pictures = take_pictures(found.messages, row, record.place)
    if pictures:
        return replace(
            found, messages=messages, pictures=pictures, folder=str(Path(record.file).parent)
        )
    return found


def _has_any(row: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return any(row.get(key) not in (None, "", [], "[]") for key in keys)


def ignored_keys(row: Mapping[str, Any], name: FormatName, columns: Columns = None) -> list[str]:
    """Keys of a row that nothing reads."""
    columns = columns or {}
    used = set(FORMATS[name].keys + FORMATS[name].beside) - set(columns) | set(columns.values())
    used |= {key for key, theirs in columns.items() if theirs is None}
    return [key for key in row if key not in used]


def _preference(row: Mapping[str, Any], place: str) -> Example:
    """A prompt with a chosen and a rejected answer. Of two conversations, the turns with which both
    begin belong to the prompt; a prompt that these turns have already is not added again.
    """
    prompt, chosen, rejected = (
        _turns_or_text(row.get(key), f"{place}: {key}") for key in ("prompt", *_PREFERENCES)
    )
    if chosen == rejected and chosen:
        raise RowError(f"{place}: chosen and rejected are the same: the pair teaches nothing")
    for key, value in zip(_PREFERENCES, (chosen, rejected)):
        if not value:
            raise EmptyAnswer(f"{place}: {key} is empty: the row has no target")
    if isinstance(chosen, list) and isinstance(rejected, list):
        both = next(
            (i for i, (one, other) in enumerate(zip(chosen, rejected)) if one != other),
            min(len(chosen), len(rejected)),
        )
        begin = chosen[:both]
        if isinstance(prompt, str):
            known = not prompt.strip() or any(
                isinstance(turn, dict) and turn.get("content") == prompt for turn in begin
            )
            prompt = [] if known else [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and begin[: len(prompt)] == prompt:
            prompt = []
        prompt = [*(prompt or []), *begin]
        chosen = chosen[both:]
        rejected = rejected[both:]
        if not chosen or not rejected:
            raise RowError(
                f"{place}: one of chosen and rejected is the beginning of the other: it has no"
                " answer of its own"
            )
    elif prompt is None:
        raise RowError(
            f"{place}: no key 'prompt': chosen and rejected as text need it; write what both answer"
            " as prompt"
        )
    beside = {key: row.get(key) for key in CONVERSATION_KEYS}
    sides = {
        key: {**beside, "prompt": prompt, key: value}
        for key, value in zip(_PREFERENCES, (chosen, rejected))
    }
    return replace(
        _pair(sides["chosen"], place, "chosen"),
        rejected=_pair(sides["rejected"], place, "rejected"),
    )


def _label(value: Any, place: str) -> bool:
    if isinstance(value, str | int):
        found = _LABELS.get(value.strip().casefold() if isinstance(value, str) else value)
    else:
        found = None
    if found is None:
        raise RowError(
            f"{place}: label must be true or false, got {json.dumps(value, default=str)}"
        )
    return found


def _pair(row: Mapping[str, Any], place: str, answer: str = "completion") -> Example:
    """Prompt and completion as texts, or both as messages, of which only the completion's are
    learnt. Texts beside a system prompt, tools or pictures become messages. `answer`: the
    key of the row that holds the completion.
    """
    prompt, completion = (_turns_or_text(row[key], f"{place}: {key}") for key in ("prompt", answer))
    if isinstance(prompt, list) != isinstance(completion, list):
        both = f"prompt and {answer} must both be text, or both lists of messages"
        raise RowError(f"{place}: {both}: prompt is {kind(prompt)}, {answer} {kind(completion)}")
    if isinstance(prompt, list):
        before = chat_messages(prompt, "prompt", place, may_be_empty=True)
        after = chat_messages(completion, answer, place)
        if not any(m["role"] == "assistant" for m in after):
            raise RowError(f"{place}: {answer} has no assistant turn: the row has no target")
    else:
        prompt = _text(row["prompt"], "prompt", place, may_be_empty=True)
        completion = _answer(row[answer], answer, place)
        if not _has_any(row, CONVERSATION_KEYS):
            return Example(place, prompt=prompt, completion=completion)
        before = ({"role": "user", "content": prompt},)
        after = ({"role": "assistant", "content": completion},)
    before = with_system(before, row.get("system"), place)
    return Example(
        place, messages=before + after, tools=tool_list(row, place), learn_from=len(before)
    )


def _turns_or_text(value: Any, at: str) -> Any:
    """A list of messages that a table's cell holds as JSON; any other text as it is, also an answer
    that is a JSON list.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = parsed_json(value, at)
    is_list = isinstance(found, list) and found and all(isinstance(turn, dict) for turn in found)
    if is_list and any((_TURN | {"content"}) & turn.keys() for turn in found):
        return found
    return value


def _alpaca(row: Mapping[str, Any], place: str) -> tuple[Message, ...]:
    instruction = _text(row["instruction"], "instruction", place, may_be_empty=True)
    given = _text(row.get("input") or "", "input", place, may_be_empty=True)
    asked = "\n\n".join(part for part in (instruction, given) if part.strip())
    if not asked:
        raise RowError(f"{place}: instruction and input are both empty")
    output = _answer(row["output"], "output", place)
    history = parsed_json(row.get("history"), f"{place}: history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list | tuple) and len(turn) == 2 for turn in history
    ):
        raise RowError(f"{place}: history must be a list of [question, answer]")
    messages = list(with_system((), row.get("system"), place))
    for i, (question, answer) in enumerate(history):
        messages.append({"role": "user", "content": _text(question, f"history[{i}][0]", place)})
        messages.append({"role": "assistant", "content": _text(answer, f"history[{i}][1]", place)})
    return (*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": output})


def _require(row: Mapping[str, Any], name: FormatName, place: str) -> None:
    missing = next((key for key in FORMATS[name].keys if key not in row), None)
    if missing is None:
        return
    other = next(
        (n for n, form in FORMATS.items() if n != name and all(key in row for key in form.keys)),
        None,
    )
    if other:
        raise RowError(
            f"{place}: the row is {other}, but the file is read as {name}: one file holds one"
            " format"
        )
    raise RowError(
        f"{place}: no key {missing!r}{_suggestion(missing, row)} (the file is read as {name})"
    )


def _unknown(row: Mapping[str, Any]) -> str:
    """What is said of a row with the keys of no format: what to write in `data.columns`, or which
    key may be meant.
    """
    plain = {key.strip().casefold(): key for key in row if isinstance(key, str)}
    for form in FORMATS.values():
        if all(key in plain for key in form.keys):
            columns = {
                key: plain[key] for key in form.keys + form.beside if plain.get(key, key) != key
            }
            return (
                f"keys are in small letters, without blanks: data.columns: {write_value(columns)}"
            )
    for ours, theirs in _PAIRS:
        if ours in row and theirs in row:
            beside = {
                key: name
                for key, names in _BESIDE_A_PAIR.items()
                for name in names
                if name in row and name not in (ours, theirs)
            }
            pair = ("instruction", "output") if beside else ("prompt", "completion")
            columns = {
                key: name
                for key, name in {pair[0]: ours, pair[1]: theirs, **beside}.items()
                if key != name
            }
            also = f" beside {', '.join(beside.values())}" if beside else ""
            return (
                f"the row has {ours} and {theirs}{also}; if these are question and answer:"
                f" data.columns: {write_value(columns)}"
            )
    lists = [
        key
        for key, value in row.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    turns = [key for key in lists if _TURN & row[key][0].keys()]
    known = {key for form in FORMATS.values() for key in form.keys}
    named = [
        key
        for key in row
        if key not in known
        and (key not in lists or key in turns)
        and not isinstance(row[key], dict)
    ]
    for form in FORMATS.values():
        for key in form.keys:
            if close := _near(key, named, row):
                return f"{close[0]}: unknown key, did you mean {key}?"
    for form in FORMATS.values():
        for key, missing in zip(form.keys, form.keys[::-1]):
            if key in row and missing not in row:
                return f"the row has {key} but no {missing}"
    if turns:
        return f"{turns[0]} is a list of turns: data.columns: {{messages: {turns[0]}}}"
    if lists:
        return (
            f"no known format in the keys; {lists[0]} is a list of objects: if these are the rows,"
            " give a file that is that list alone"
        )
    return (
        f"no known format in the keys ({_listed(row)}): use messages, or prompt and completion, or"
        " text, or name them in data.columns"
    )


def _near(key: str, among: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The key that is written most like one of a format, if its value can be what the format has
    there: `message` is no `messages`.
    """
    turns = key in ("messages", "conversations")
    can_be = [
        other
        for other in among
        if not turns or isinstance(row[other], list) or str(row[other]).lstrip().startswith("[")
    ]
    return difflib.get_close_matches(key, can_be, n=1, cutoff=0.75)


def _column(ours: str, theirs: str, row: Mapping[str, Any]) -> str:
    """What to write in `data.columns` in place of a name that the row lacks."""
    close = difflib.get_close_matches(
        theirs.lower(), [key for key in row if isinstance(key, str)], n=1, cutoff=0.75
    )
    if close:
        return f", but {close[0]!r}: data.columns.{ours}: {close[0]}"
    return f" (data.columns.{ours}) among {_listed(row)}"


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(list(row)[:6]) or "none"


def _suggestion(key: str, row: Mapping[str, Any]) -> str:
    close = _near(key, list(row), row)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


def _answer(value: Any, key: str, place: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise EmptyAnswer(f"{place}: {key} is empty: the row has no target")
    return _text(value, key, place)


def _text(value: Any, key: str, place: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RowError(f"{place}: {key} must be text, got {kind(value)}")
    if not may_be_empty and not value.strip():
        raise RowError(f"{place}: {key} is empty")
    return value
