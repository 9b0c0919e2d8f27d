"""Another tool's data may use other names for the keys of a row and of a chat message (a turn) than
Isotype does. This module writes these names into the settings `columns` and `roles` of an entry in
data.train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.row_keys import ROLES, SHAREGPT_ROLES

_SHAREGPT_TURN = ("from", "value")
_MESSAGE_TURN = ("role", "content")


def add_columns(entry: dict[str, Any], columns: Mapping[str, Any]) -> None:
    """Adds names to the entry's `columns`, which maps each key of Isotype to the name that the data
    uses. A name is left out if it is empty or equal to Isotype's key.
    """
    renamed_keys = {
        key: str(name) for key, name in columns.items() if name not in (None, "") and name != key
    }
    if renamed_keys:
        entry["columns"] = {**entry.get("columns", {}), **renamed_keys}


def set_turn_columns(
    entry: dict[str, Any],
    list_key: object,
    turn_keys: tuple[str, str],
    role_names: Mapping[str, Sequence[str]],
    *,
    turn_columns: Mapping[str, Any] | None = None,
    sets_format: bool = True,
) -> None:
    """Sets `columns`, `format` and `roles` of an entry whose rows contain a list of turns.

    list_key      the key under which a row has the list of turns
    turn_keys     the keys under which a turn has its role and its content
    role_names    a mapping from Isotype's name of a role to the names that the data uses for this
                  role
    turn_columns  other keys of a turn, as a mapping from Isotype's key to the key that the data
                  uses
    sets_format   whether to set `format`; this is not needed for preference pairs and labels, which
                  have only one format
    """
    is_sharegpt = turn_keys == _SHAREGPT_TURN
    columns: dict[str, Any] = {"conversations" if is_sharegpt else "messages": list_key}
    if not is_sharegpt:
        columns |= dict(zip(_MESSAGE_TURN, turn_keys, strict=True))
    add_columns(entry, columns | dict(turn_columns or {}))
    if sets_format:
        entry["format"] = "sharegpt" if is_sharegpt else "messages"
    has_own_role_key = not is_sharegpt and turn_keys[0] != "role"
    recognised_roles = SHAREGPT_ROLES if is_sharegpt or has_own_role_key else _MESSAGE_ROLES
    roles = {
        role: [word for word in names if recognised_roles.get(word.casefold()) != role]
        for role, names in role_names.items()
    }
    if unknown_roles := {role: _one_or_list(unknown) for role, unknown in roles.items() if unknown}:
        entry["roles"] = unknown_roles


_MESSAGE_ROLES = {role: role for role in (*ROLES, "function_call")}


def _one_or_list(words: Sequence[str]) -> str | list[str]:
    return words[0] if len(words) == 1 else list(words)
