"""Rows that are one turn of a conversation, as chat services log them: a row that is trained on holds a whole conversation.

A turn is known by who says it (`role`, `sender`), what is said (`content`, `text`), the conversation it belongs to (`conversation_id`)
and its number in it (`turn`). Texts of which several have the same conversation are its parts, whatever else their rows hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
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


def refuse_data_frame(record: Record) -> None:
    """Raises UsageError where a file's first value is a whole table, as pandas' `to_json()` writes it."""
    value = record.value
    if not isinstance(value, dict) or not value:
        return
    if value.keys() in ({"columns", "index", "data"}, {"schema", "data"}):
        orient = "split" if "index" in value else "table"
    elif all(map(_by_number, value.values())):
        orient = "columns"
    elif _by_number(value) and all(isinstance(row, dict) for row in value.values()):
        orient = "index"
    else:
        return
    # else pandas would make numbers of texts that look like them; a schema says what they are
    as_they_are = "" if orient == "table" else ", dtype=False"
    raise UsageError(
        f"{record.place}: one table, as pandas' to_json(orient={orient!r}) writes it, and each row must be an object",
        fix=f'pandas.read_json("{record.file}", orient="{orient}"{as_they_are}).to_json("rows.jsonl", orient="records", lines=True)',
    )


def _by_number(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(key.isdecimal() for key in value)
