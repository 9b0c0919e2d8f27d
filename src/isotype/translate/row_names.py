"""What other tools call the keys of a row and of its turns, as the `columns` and `roles` of an entry
of data.train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.row_keys import ROLES, SHAREGPT_ROLES

_SHAREGPT_TURN = ("from", "value")
_MESSAGE_TURN = ("role", "content")


def add_columns(entry: dict[str, Any], columns: Mapping[str, Any]) -> None:
    """Adds our key -> the data's name; a name that is ours already, or not given, is left out."""
    named = {
        key: str(name) for key, name in columns.items() if name not in (None, "") and name != key
    }
    if named:
        entry["columns"] = {**entry.get("columns", {}), **named}


def name_turns(
    entry: dict[str, Any],
    field: object,
    turn_keys: tuple[str, str],
    words: Mapping[str, Sequence[str]],
    *,
    turn_columns: Mapping[str, Any] | None = None,
    row_format: bool = True,
) -> None:
    """Names the list of turns of a row.

    field         the key of the list
    turn_keys     what a turn calls role and content
    words         our role -> the data's words for it
    turn_columns  our other keys of a turn -> the data's
    row_format    whether the entry says its format; pairs and labels have one
    """
    is_sharegpt = turn_keys == _SHAREGPT_TURN
    columns: dict[str, Any] = {"conversations" if is_sharegpt else "messages": field}
    if not is_sharegpt:
        columns |= dict(zip(_MESSAGE_TURN, turn_keys, strict=True))
    add_columns(entry, columns | dict(turn_columns or {}))
    if row_format:
        entry["format"] = "sharegpt" if is_sharegpt else "messages"
    has_own_role_key = not is_sharegpt and turn_keys[0] != "role"
    known = SHAREGPT_ROLES if is_sharegpt or has_own_role_key else _MESSAGE_ROLES
    roles = {
        role: [word for word in role_words if known.get(word.casefold()) != role]
        for role, role_words in words.items()
    }
    if named := {role: _one_or_list(unknown) for role, unknown in roles.items() if unknown}:
        entry["roles"] = named


_MESSAGE_ROLES = {role: role for role in (*ROLES, "function_call")}


def _one_or_list(words: Sequence[str]) -> str | list[str]:
    return words[0] if len(words) == 1 else list(words)
