"""Renames the keys of a row to the keys that Isotype reads. The settings `data.columns` and
`data.roles` say which keys and roles to rename. This module also renames keys that differ from
Isotype's keys only in capital letters and spaces, and converts the rows of a file that ChatGPT
exported. The rows of all formats pass through this module, for every objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from .answer_labels import is_unwanted_column, parse_answer_label
from .bad_rows import RowError
from .conversations import describe_json_type, parse_json_cell
from .key_hints import column_hint
from .read import Record
from .row_keys import (
    FORMATS,
    KNOWN_KEYS,
    SHAREGPT_ROLES,
    TURN_COLUMNS,
    TURN_LISTS,
    Columns,
    FormatName,
    Roles,
    labelled_format,
    normalise_name,
)

# optional keys that are also recognised in another spelling; only texts are accepted for them
_SPELLED_TEXT_KEYS = ("input", "system", "prompt")
_EXPORT_KEYS = ("mapping", "current_node")  # keys of ChatGPT's export
EXPORT_NOTE = "ChatGPT's export, read as messages"


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row with renamed keys. `names` maps each renamed key to its original name in the row.

    values  the row, with Isotype's keys
    """

    values: dict[str, Any]
    names: Mapping[str, str]


def rename_row(
    record: Record,
    columns: Columns = None,
    roles: Roles = None,
    *,
    row_format: FormatName | None = None,
) -> NamedRow:
    """Returns the row with its keys renamed as `data.columns` says. A renamed key replaces a key of
    the row with the same name.

    roles       a mapping from the name of a role in the data to Isotype's name of this role
    row_format  the format of the row, or None before it is detected
    Raises      RowError
    """
    row = _require_object(record)
    if "mapping" in row and isinstance(row["mapping"], dict) and not KNOWN_KEYS & row.keys():
        return NamedRow(
            {
                **{key: value for key, value in row.items() if key not in _EXPORT_KEYS},
                "messages": _export_messages(row, record.location),
            },
            {"messages": "mapping"},
        )
    names = _explicit_names(row, columns, record.location, row_format)
    hidden = {key for key, column in (columns or {}).items() if column is None}
    hidden |= names.keys() | set(names.values())
    values = {key: value for key, value in row.items() if key not in hidden}
    values |= {key: row[column] for key, column in names.items()}
    spellings = _match_spellings(values, row_format, hidden)
    for key, column in spellings.items():
        values[key] = values.pop(column)
    turn_columns = {
        key: column for key, column in (columns or {}).items() if key in TURN_COLUMNS and column
    }
    if turn_columns or roles:
        _rename_turns(values, turn_columns, roles or {}, record.location)
    if row_format == "labelled":
        _normalise_label(values, columns)
    return NamedRow(values, names | spellings)


def _require_object(record: Record) -> dict[str, Any]:
    if record.error:
        raise RowError(f"{record.location}: {record.error}")
    if isinstance(record.value, dict):
        return record.value
    if isinstance(record.value, list):
        fix = 'name the values of each row: pandas writes them so with orient="records"'
    else:
        fix = None
    raise RowError(
        f"{record.location}: a row must be an object with keys, got {describe_json_type(record.value)}",
        fix=fix,
    )


def _explicit_names(
    row: Mapping[str, Any], columns: Columns, location: str, row_format: FormatName | None
) -> dict[str, str]:
    """Returns a mapping from Isotype's key to the row's key, for the keys in `data.columns`. Raises
    RowError for a key that the row does not have.
    """
    names: dict[str, str] = {}
    for key, column in (columns or {}).items():
        if column is None or key in TURN_COLUMNS:
            continue
        if key not in KNOWN_KEYS:
            accepted_keys = ", ".join(sorted(KNOWN_KEYS | set(TURN_COLUMNS)))
            raise UsageError(f"data.columns.{key}: unknown key: one of {accepted_keys}")
        spelling = column if column in row else _find_spelling(column, row)
        if spelling is not None:
            names[key] = spelling
        # a labelled row may have its label in a turn; a row without any label is left out later
        elif not (key == "label" and row_format == "labelled"):
            raise RowError(f"{location}: no key {column!r}{column_hint(key, column, row)}")
    return names


def _find_spelling(name: str, row: Mapping[str, Any]) -> str | None:
    """Returns the key of the row that differs from `name` only in capital letters and spaces.
    Returns None if there is no such key or more than one.
    """
    normalised = normalise_name(name)
    matches = [key for key in row if isinstance(key, str) and normalise_name(key) == normalised]
    return matches[0] if len(matches) == 1 else None


def _match_spellings(
    row: Mapping[str, Any], row_format: FormatName | None, hidden: set[str]
) -> dict[str, str]:
    """Returns a mapping from Isotype's key to the row's key, for keys that differ only in capital
    letters and spaces. If the format of the row is already known, only the optional text keys of
    this format are matched.
    """
    unknown_keys = [key for key in row if isinstance(key, str) and key not in KNOWN_KEYS]
    if not unknown_keys:
        return {}
    counts = Counter(map(normalise_name, unknown_keys))
    matches = {normalise_name(key): key for key in unknown_keys if counts[normalise_name(key)] == 1}
    matches = {
        key: name
        for key, name in matches.items()
        if key in KNOWN_KEYS and not (key in row or key in hidden)
    }
    formats = _matching_formats(row, row_format)
    if not matches or not formats:
        return matches
    optional = {key for name in formats for key in FORMATS[name].optional_keys}
    if "preference" in formats and "instruction" in row:
        optional.add("input")
    return {
        key: name
        for key, name in matches.items()
        if key in optional.intersection(_SPELLED_TEXT_KEYS) and _is_text(row[name])
    }


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _matching_formats(row: Mapping[str, Any], row_format: FormatName | None) -> list[FormatName]:
    """Returns the formats for which the row has all required keys, in exactly the same spelling."""
    candidates = FORMATS if row_format is None else [row_format]
    formats = [name for name in candidates if all(key in row for key in FORMATS[name].keys)]
    if "labelled" not in formats or row_format is None:
        return formats
    inner_format = labelled_format(row)
    return [] if inner_format is None else [*formats, inner_format]


def _rename_turns(
    row: dict[str, Any], columns: Mapping[str, str], roles: Mapping[str, str], location: str
) -> None:
    """Renames the keys and roles of all turns in the row. Raises RowError if the row has no list of
    turns.
    """
    count = 0
    for key in TURN_LISTS:
        value = parse_json_cell(row.get(key), f"{location}: {key}")
        turns = [value] if isinstance(value, dict) else value
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            continue
        renamed = [_rename_turn(turn, columns, roles) for turn in turns]
        count += len(renamed)
        row[key] = renamed[0] if isinstance(value, dict) else renamed
    if not count:
        setting = f"data.columns.{next(iter(columns))}" if columns else "data.roles"
        raise RowError(
            f"{location}: no list of turns in the row, and {setting} is about turns",
            fix=f"data.columns: {{messages: NAME}} says which key holds them; else leave {setting} out",
        )


def _rename_turn(
    turn: Mapping[str, Any], columns: Mapping[str, str], roles: Mapping[str, str]
) -> dict[str, Any]:
    present = {key: column for key, column in columns.items() if column in turn}
    hidden = present.keys() | set(present.values())
    renamed = {key: value for key, value in turn.items() if key not in hidden}
    renamed |= {key: turn[column] for key, column in present.items()}
    role_key = "role" if "role" in renamed else "from"
    source_role = renamed.get(role_key)
    if isinstance(source_role, str):
        role = roles.get(source_role) or roles.get(source_role.casefold())
        # data with another key for roles often has other names of roles too
        if role is None and "role" in present:
            role = SHAREGPT_ROLES.get(source_role.casefold())
        renamed[role_key] = role or source_role
    return renamed


def _normalise_label(row: dict[str, Any], columns: Columns) -> None:
    """Takes the label from the last turn if the row itself has no label. Inverts the label if the
    value true in the label's column means that the answer is unwanted.
    """
    name = (columns or {}).get("label") or "label"
    if "label" not in row:
        for key in ("messages", "conversations", "completion"):
            turns = parse_json_cell(row.get(key), key)
            last_turn = turns[-1] if isinstance(turns, list) and turns else None
            if isinstance(last_turn, dict) and name in last_turn:
                row["label"] = last_turn[name]
    if "label" in row and is_unwanted_column(name):
        verdict = parse_answer_label(row["label"])
        row["label"] = row["label"] if verdict is None else not verdict


def _export_messages(row: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Returns the turns of a conversation that ChatGPT exported, from its first node to the current
    node. Tools and hidden instructions are left out. Raises RowError.
    """
    nodes = row["mapping"]
    name = row.get("current_node")
    path: list[Mapping[str, Any]] = []
    visited: set[str] = set()
    while isinstance(name, str) and isinstance(nodes.get(name), dict):
        if name in visited:
            raise RowError(f"{location}: mapping: the node {name!r} is its own ancestor")
        visited.add(name)
        path.append(nodes[name])
        name = nodes[name].get("parent")
    if not path:
        raise RowError(f"{location}: current_node names no node of mapping")
    messages: list[dict[str, Any]] = []
    for node in reversed(path):
        turn = _export_turn(node.get("message"), location)
        if turn is None:
            continue
        if (
            messages and messages[-1]["role"] == turn["role"]
        ):  # successive turns of one role are parts of one answer
            messages[-1]["content"] += "\n\n" + turn["content"]
        else:
            messages.append(turn)
    return messages


def _export_turn(message: Any, location: str) -> dict[str, Any] | None:
    """Converts one message of a ChatGPT export to a turn. Returns None for a message without text
    that the user can see, such as a tool call or a hidden instruction.
    """
    if not isinstance(message, dict):
        return None
    metadata = message.get("metadata") or {}
    role = (message.get("author") or {}).get("role")
    content = message.get("content") or {}
    is_for_tool = message.get("recipient") not in (None, "all")
    is_text = content.get("content_type") in ("text", "multimodal_text")
    is_hidden = metadata.get("is_visually_hidden_from_conversation")
    if role not in ("user", "assistant", "system") or not is_text or is_hidden or is_for_tool:
        return None
    parts = content.get("parts") or []
    if not all(isinstance(part, str) for part in parts):
        raise RowError(
            f"{location}: a turn of {role} has a picture or a file, which the export only names"
        )
    text = "".join(parts)
    return {"role": role, "content": text} if text.strip() else None


def used_names(row: NamedRow) -> set[str]:
    """Returns the original names of the renamed keys."""
    names = set(row.names.values())
    return names | set(_EXPORT_KEYS) if "mapping" in names else names


def describe_name(key: str, names: Mapping[str, str]) -> str:
    """Returns the text that names a key in a message. If the key was renamed, the text contains its
    original name in the row.
    """
    name = names.get(key, key)
    if name == key:
        return key
    if name == "mapping":
        return f"mapping ({EXPORT_NOTE})"
    shown = repr(name) if name != name.strip() else name
    return f"{shown} (read as {key})"
