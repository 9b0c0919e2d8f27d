"""What a row holds: messages, prompt and completion, or text. Detection from the first row, checks of every row.

A format is recognised by its keys; keys beside them (`id`, `source`) are counted and named in the facts, never silently used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError
from .read import Record

FormatName = Literal["messages", "prompt_completion", "text"]
Message = dict[str, Any]

KEYS: dict[FormatName, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_BESIDE_MESSAGES = ("tools",)  # handed to the chat template
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "ai": "assistant", "chatbot": "assistant"}


@dataclass(frozen=True, slots=True)
class Example:
    """One checked row of a data file, before tokenisation. Exactly one of `messages`, `completion`, `text` is set."""

    place: str
    messages: tuple[Message, ...] | None = None
    tools: Any = None
    prompt: str = ""
    completion: str | None = None
    text: str | None = None


def detect(record: Record, asked: FormatName | Literal["auto"]) -> tuple[FormatName, str]:
    """The format of a file from its first row, and why."""
    row = _object(record)
    if asked != "auto":
        _require(row, asked, record.place)
        return asked, f"data.format is {asked}"
    found = [name for name, keys in KEYS.items() if all(key in row for key in keys)]
    if len(found) > 1:
        names = " and ".join(", ".join(KEYS[name]) for name in found)
        raise UsageError(f"{record.place}: the row has {names}: set data.format to {' or '.join(found)}")
    if not found:
        raise UsageError(f"{record.place}: {_unknown(row)}")
    return found[0], f"the first row ({record.place}) has the {'keys' if len(KEYS[found[0]]) > 1 else 'key'} {' and '.join(KEYS[found[0]])}"


def example(record: Record, name: FormatName, *, needs_answer: bool) -> Example:
    """Checks one row. `needs_answer`: the loss is on answers only, so a row without one is an error."""
    row, place = _object(record), record.place
    _require(row, name, place)
    if name == "text":
        return Example(place, text=_text(row["text"], "text", place))
    if name == "prompt_completion":
        prompt = _text(row["prompt"], "prompt", place, may_be_empty=True)
        completion = _text(row["completion"], "completion", place, may_be_empty=True)
        if not completion.strip():
            raise UsageError(f"{place}: completion is empty: the row has no target")
        return Example(place, prompt=prompt, completion=completion)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{place}: messages must be a list of {{role, content}}, got {_kind(messages)}")
    checked = tuple(_message(m, i, place) for i, m in enumerate(messages))
    if needs_answer and not any(m["role"] == "assistant" for m in checked):
        raise UsageError(f"{place}: messages has no assistant turn: the row has no target")
    return Example(place, messages=checked, tools=row.get("tools"))


def ignored_keys(row: Mapping[str, Any], name: FormatName) -> list[str]:
    """Keys of a row that nothing reads."""
    used = KEYS[name] + (_BESIDE_MESSAGES if name == "messages" else ())
    return [key for key in row if key not in used]


def _object(record: Record) -> dict[str, Any]:
    if not isinstance(record.value, dict):
        raise UsageError(f"{record.place}: a row must be an object with keys, got {_kind(record.value)}")
    return record.value


def _require(row: Mapping[str, Any], name: FormatName, place: str) -> None:
    missing = [key for key in KEYS[name] if key not in row]
    if not missing:
        return
    other = next((n for n, keys in KEYS.items() if n != name and all(key in row for key in keys)), None)
    if other:
        raise UsageError(f"{place}: the row is {other}, but the file is read as {name}: one file holds one format")
    raise UsageError(f"{place}: no key {missing[0]!r}{_suggestion(missing[0], row)} (the file is read as {name})")


def _unknown(row: Mapping[str, Any]) -> str:
    for keys in KEYS.values():
        for key in keys:
            if close := difflib.get_close_matches(key, [k for k in row if k not in ("prompt", "completion")], n=1, cutoff=0.75):
                return f"{close[0]}: unknown key, did you mean {key}?"
    for key, missing in (("prompt", "completion"), ("completion", "prompt")):
        if key in row:
            return f"the row has {key} but no {missing}"
    shown = ", ".join(list(row)[:6]) or "none"
    return f"no known format in the keys ({shown}): use messages, or prompt and completion, or text"


def _suggestion(key: str, row: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, list(row), n=1, cutoff=0.75)
    return f", but {close[0]!r}: did you mean {key}?" if close else ""


def _message(message: Any, index: int, place: str) -> Message:
    where = f"{place}: messages[{index}]"
    if not isinstance(message, dict):
        raise UsageError(f"{where} must be an object with role and content, got {_kind(message)}")
    if "role" not in message:
        if "from" in message and "value" in message:
            raise UsageError(f"{where} has from and value: rename them to role and content (human is user, gpt is assistant)")
        raise UsageError(f"{where} has no role{_suggestion('role', message)}")
    role = message["role"]
    if role not in ROLES:
        meant = _OTHER_NAMES.get(str(role).lower()) or next(iter(difflib.get_close_matches(str(role).lower(), ROLES, n=1)), None)
        raise UsageError(f"{where}.role: unknown role {role!r}" + (f", did you mean {meant}?" if meant else f": use {', '.join(ROLES)}"))
    content = message.get("content")
    if role == "assistant" and message.get("tool_calls"):
        return {**message, "content": content or ""}
    if "content" not in message:
        raise UsageError(f"{where} has no content{_suggestion('content', message)}")
    _text(content, f"messages[{index}].content", place, may_be_empty=role != "assistant")
    return message


def _text(value: Any, key: str, place: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key} must be text, got {_kind(value)}")
    if not may_be_empty and not value.strip():
        raise UsageError(f"{place}: {key} is empty" + (": the row has no target" if key.startswith("messages") else ""))
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return ("an empty list" if value == [] else None) or names.get(type(value), type(value).__name__)
