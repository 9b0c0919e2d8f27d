"""Assignments and commands of a shell script or an env file: as a shell reads them.

No shell is run: quotes, `export`, `+=`, `${NAME}`, `${NAME:-default}` and continued lines are read; `$(...)` is left as it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+-x\s+|set\s+)?(?P<name>[A-Za-z_]\w*)(?P<plus>\+?)=(?P<value>.*)$", re.S)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<bare>[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Assignment:
    name: str
    value: str
    line: int


@dataclass(slots=True)
class Script:
    """variables: the last value of each; commands: (words, line), the environment written before a command included in `prefixed`."""

    variables: dict[str, Assignment] = field(default_factory=dict)
    commands: list[tuple[list[str], int]] = field(default_factory=list)
    prefixed: dict[str, Assignment] = field(default_factory=dict)


def read(text: str) -> Script:
    """As a shell would."""
    script = Script()
    for line, logical in _logical_lines(text):
        _read_line(script, logical.strip(), line)
    return script


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines joined where a backslash or an open quote continues them."""
    joined: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        start = start or number
        pending += raw
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if _open_quote(pending) and number - start < 200:
            pending += "\n"
            continue
        joined.append((start, pending))
        pending, start = "", 0
    if pending:
        joined.append((start, pending))
    return joined


def _open_quote(text: str) -> bool:
    quote = ""
    for i, char in enumerate(text):
        if quote:
            if char == quote and not (quote == '"' and text[i - 1] == "\\"):
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or text[i - 1].isspace()):
            return False
    return bool(quote)


def _expand(script: Script, word: str) -> str:
    def lookup(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name in script.variables:
            return script.variables[name].value
        return match["default"] if match["default"] is not None else ""

    return _VARIABLE.sub(lookup, word)


def _read_line(script: Script, text: str, line: int) -> None:
    if not text or text.startswith("#"):
        return
    if re.match(r"^(?:if|then|else|fi|for|do|done|while|function|case|esac)\b", text):
        return
    for command in _split(text):
        _read_command(script, command, line)


def _read_command(script: Script, raw_words: list[tuple[str, bool]], line: int) -> None:
    words: list[str] = []
    pending: list[Assignment] = []
    exported = False
    for raw, single in raw_words:
        value = raw if single else _expand(script, raw)
        if not words and (match := _ASSIGNMENT.match(value)):
            old = script.variables.get(match["name"])
            new = (old.value if old and match["plus"] else "") + match["value"]
            pending.append(Assignment(match["name"], new, line))
        elif not words and value in ("export", "declare", "-x", "env", "set"):
            exported = True
        else:
            words += [value] if single or not re.search(r"\s", value) or " " in raw else value.split()
    target = script.prefixed if words and not exported else script.variables
    for assignment in pending:
        target[assignment.name] = assignment
    if words:
        script.commands.append((words, line))


def _split(text: str) -> list[list[tuple[str, bool]]]:
    """The commands of a line (`;`, `&&`, `|` part them), each as (word without quotes, whether single quotes kept it from expansion)."""
    commands: list[list[tuple[str, bool]]] = []
    words: list[tuple[str, bool]] = []
    at, current, single, started = 0, "", False, False
    while at < len(text):
        char = text[at]
        if char == "#" and not started:
            break
        if char.isspace() or char in ";&|":
            if started:
                words.append((current, single))
            current, single, started = "", False, False
            if char in ";&|" and words:
                commands.append(words)
                words = []
        elif char == "'":
            end = text.find("'", at + 1)
            end = len(text) if end < 0 else end
            current += text[at + 1 : end]
            single, started, at = True, True, end
        elif char == '"':
            end = at + 1
            while end < len(text) and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            current += text[at + 1 : end].replace('\\"', '"')
            started, at = True, end
        else:
            current += char
            started = True
        at += 1
    if started:
        words.append((current, single))
    return [*commands, words] if words else commands


def arguments(words: list[str]) -> dict[str, str | bool]:
    """`--name value`, `--name=value`, `--flag` -> name (dashes as underscores) to value; a flag without a value is True."""
    found: dict[str, str | bool] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith("-") and len(word) > 1 and not re.match(r"^-\d", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if equals:
                found[name] = value
            elif at + 1 < len(words) and not (words[at + 1].startswith("--") or re.match(r"^-[A-Za-z]", words[at + 1])):
                found[name] = words[at + 1]
                at += 1
            else:
                found[name] = True
        at += 1
    return found
