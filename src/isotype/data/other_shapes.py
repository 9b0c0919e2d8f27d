"""Rows that are one turn of a conversation, as chat services log them: a row that is trained on holds a whole conversation.

A turn is known by who says it (`role`, `sender`), what is said (`content`, `text`), the conversation it belongs to (`conversation_id`)
and its number in it (`turn`). Texts of which several have the same conversation are its parts, whatever else their rows hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import UsageError
from ..wording import counted
from .bad_rows import RowError
from .read import Record

# keys as `_plain` writes them: conversation_id, conversationId and "Conversation ID" are one
_CONVERSATION = re.compile(
    r"(conversation|conv|session|thread|chat|dialog|dialogue|ticket|room)(id|uuid|key|no|number)|conversation|dialogue?"
)
_WHO = re.compile(r"role|from|speaker|participant|(message)?(sender|author)(type|role|name|id)?")
_SAID = ("content", "text", "message", "value", "utterance", "body", "msg")
_NUMBER = re.compile(r"(turn|message|msg|utterance)?(index|idx|number|no|num|order|position)|turn(id)?|seq(uence)?")
_TIME = re.compile(r"timestamp|time|ts|date|datetime|(created|sent)(at|on)?")
_ROLES = {
    "user", "assistant", "system", "developer", "human", "gpt", "prompter", "bot", "chatbot", "model", "tool", "ai", "agent", "customer",
    "client", "visitor",
}  # fmt: skip
WHOLE = 'a row holds a whole one: {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
AS_TEXTS = "data.format: text learns every turn as a text of its own"


def refuse_turn(row: Mapping[str, Any], place: str, *, is_text: bool = False) -> None:
    """Raises  RowError for a row that is one turn, with the keys by which the turns are put together.

    is_text  the row would be learnt as a text: a key `author` or `from` alone, as texts of other kinds have it, makes it no turn
    """
    keys = {_plain(key): key for key in row if isinstance(key, str)}
    said = next((keys[name] for name in _SAID if name in keys and row[keys[name]]), None)
    if said is None or _turns(row[said]):
        return
    inside = isinstance(row[said], dict) and {"role", "content"} <= row[said].keys()
    who = keys.get("role") or _first(keys, _WHO, but=said)
    conversation, number = _first(keys, _CONVERSATION, but=said), _first(keys, _NUMBER, but=said)
    of_a_chat = who is not None and _plain(who) not in ("author", "from")
    named = who is not None and _role(row[who]) in _ROLES
    if is_text:
        found = (conversation and (who or number)) or (of_a_chat and (number or named))
    else:
        found = conversation or inside or (of_a_chat and (who == "role" or number)) or (who == "from" and said == "value")
    if not found:
        return
    shown = said if inside or who is None else f"{who} and {said}"
    told = [f"{key} becomes {name}" for key, name in ((who, "role"), (said, "content")) if key and key != name and not inside]
    told += ["who says it becomes role, and is in no key"] if who is None and not inside else []
    steps = [_together(conversation, number or _first(keys, _TIME, but=said)), ", ".join(told), AS_TEXTS if is_text else ""]
    raise RowError(f"{place}: the row has {shown}: one turn of a conversation; {WHOLE}", fix="; ".join(filter(None, steps)))


def refuse_parts(rows: Iterable[tuple[Record, Mapping[str, Any]]]) -> None:
    """Raises  RowError where two of the texts, each a record and its row, are of the same conversation."""
    first: dict[tuple[str, str], str] = {}
    for record, row in rows:
        key = _first({_plain(key): key for key in row if isinstance(key, str)}, _CONVERSATION, but="text")
        if key is None or not isinstance(row[key], str | int) or row[key] == "":
            continue
        before = first.setdefault((key, str(row[key])), record.place)
        if before != record.place:
            raise RowError(
                f"{record.place}: the same {key} as {before}, {str(row[key])[:40]!r}: parts of one conversation; {WHOLE}",
                fix=f"{_together(key, None)}; {AS_TEXTS}",
            )


def _turns(value: Any) -> bool:
    """Whether a value is a list of turns: the row is a whole conversation then, and only its key is another."""
    return isinstance(value, list) and any(isinstance(turn, dict) and turn.keys() & {"role", "from", "author"} for turn in value)


def _together(conversation: str | None, order: str | None) -> str:
    by = f"that have the same {conversation}" if conversation else "of each conversation"
    return f"put the turns {by} together into the messages of one row, {f'in the order of {order}' if order else 'in their order'}"


def _first(keys: Mapping[str, str], pattern: re.Pattern[str], *, but: str) -> str | None:
    return next((key for plain, key in keys.items() if pattern.fullmatch(plain) and key != but), None)


def _plain(key: str) -> str:
    return re.sub(r"[\W_]", "", key).casefold()


def _role(value: Any) -> str:
    """Who says a turn, also where that is an object with a role."""
    return str(value.get("role") if isinstance(value, dict) else value).strip().casefold()


_ROWS = 'orient="records", lines=True'
_SHOWN = 6  # columns that the message names


def refuse_data_frame(record: Record, keys: Collection[str]) -> None:
    """Raises UsageError where a file's first value is a whole table.

    keys  those that rows of the known formats have, as the file calls them: under them a text or a list is wanted
    """
    value = record.value
    if not isinstance(value, dict) or not value:
        return
    if value.keys() == {"columns", "index", "data"} and isinstance(value["columns"], list) and isinstance(value["data"], list):
        raise _error(record, value["columns"], len(value["data"]), "its columns, index and data apart", "split")
    fields = value["schema"].get("fields") if value.keys() == {"schema", "data"} and isinstance(value["schema"], dict) else None
    if isinstance(fields, list) and isinstance(value["data"], list):
        names = [field.get("name") for field in fields if isinstance(field, dict)]
        raise _error(record, names, len(value["data"]), "a schema and its data", "table")
    inner = list(value.values())
    if all(isinstance(one, dict) and one and one.keys() == inner[0].keys() for one in inner):
        if _is_index(inner[0]) or (not _is_index(value) and any(key in value for key in keys)):
            raise _error(record, list(value), len(inner[0]), "an object for each column", "columns")
        if _is_index(value):
            raise _error(record, list(inner[0]), len(inner), "an object for each row, under its number", "index")
    if len(inner) > 1 and any(key in value for key in keys) and all(_is_column(one) and len(one) == len(inner[0]) for one in inner):
        raise _error(record, list(value), len(inner[0]), "a list for each column", None)


def _is_index(row: dict[str, Any]) -> bool:
    return all(key.isdecimal() for key in row)


def _is_column(value: Any) -> bool:
    """A list of a table's cells, and not the turns of a conversation."""
    return isinstance(value, list) and len(value) > 1 and not any(isinstance(cell, dict | list) for cell in value)


def _error(record: Record, columns: list[Any], rows: int, form: str, orient: str | None) -> UsageError:
    named = ", ".join(map(str, columns[:_SHOWN])) + (", ..." if len(columns) > _SHOWN else "")
    said = f"{record.place}: one table of {counted(rows, 'row')}, written as {form} ({named}), and each row must be an object"
    if orient is None:
        made = f'pandas.DataFrame(json.load(open("{record.file}")))'
    else:
        form = "" if orient == "columns" else f', orient="{orient}"'
        # else pandas would make numbers of texts that look like them; a schema says what they are
        as_they_are = "" if orient == "table" else ", dtype=False"
        made = f'pandas.read_json("{record.file}"{form}{as_they_are})'
    return UsageError(said, fix=f'{made}.to_json("rows.jsonl", {_ROWS})')
