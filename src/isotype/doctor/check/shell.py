"""Assignments and commands of a shell script or an env file: as a shell reads them.

No shell is run: quotes, `export`, `+=`, `${NAME}`, `${NAME:-default}` and continued lines are read;
`$(...)` is left as it stands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(
    r"^(?:export\s+|declare\s+-x\s+|set\s+)?(?P<name>[A-Za-z_]\w*)(?P<plus>\+?)=(?P<value>.*)$",
    re.S,
)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<bare>[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Assignment:
    name: str
    value: str
    line: int


@dataclass(slots=True)
class Script:
    """variables: the last value of each; commands: (words, line), the environment written before a
    command included in `prefixed`.
    """

    variables: dict[str, Assignment] = field(default_factory=dict)
    commands: list[tuple[list[str], int]] = field(default_factory=list)
    prefixed: dict[str, Assignment] = field(default_factory=dict)


_TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;&|])\#[^\n]*)|(?P<blank>(?:[^\S\n]|\\\n)+)|(?P<end>[;&|\n])"""
    r"""|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<plain>(?:(?!\\\n)[^\s'";&|])+|.)""",
    re.S,
)
# their lines are left out
_COMPOUND = {"if", "then", "else", "fi", "for", "do", "done", "while", "function", "case", "esac"}


def read(text: str) -> Script:
    """As a shell would: `;`, `&&`, `|` and line breaks part commands."""
    script = Script()
    # a word without quotes, whether single quotes kept it from expansion
    words: list[tuple[str, bool]] = []
    word = None
    single = False
    left_out = False
    line = 1
    start = 1
    for token in _TOKEN.finditer(text + "\n\n"):  # the last line may end in a backslash
        kind = str(token.lastgroup)
        if kind in ("single", "double", "plain"):
            start = start if words or word is not None else line
            piece = token[kind].replace("\\\n", " ")
            word = (word or "") + (piece.replace('\\"', '"') if kind == "double" else piece)
            single = single or kind == "single"
        elif word is not None:
            words.append((word, single))
            word = None
            single = False
        if kind == "end" and words:
            left_out = left_out or words[0][0] in _COMPOUND
            if not left_out:
                _read_command(script, words, start)
            words = []
        left_out = left_out and token[0] != "\n"
        line += token[0].count("\n")
    return script


def _expand(script: Script, word: str) -> str:
    def lookup(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name in script.variables:
            return script.variables[name].value
        if match["default"] is not None:
            return match["default"]
        return ""

    return _VARIABLE.sub(lookup, word)


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
            words += (
                [value] if single or not re.search(r"\s", value) or " " in raw else value.split()
            )
    target = script.prefixed if words and not exported else script.variables
    for assignment in pending:
        target[assignment.name] = assignment
    if words:
        script.commands.append((words, line))


def arguments(words: list[str]) -> dict[str, str | bool]:
    """`--name value`, `--name=value`, `--flag` -> name (dashes as underscores) to value; a flag
    without a value is True.
    """
    found: dict[str, str | bool] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith("-") and len(word) > 1 and not re.match(r"^-\d", word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if equals:
                found[name] = value
            elif at + 1 < len(words) and not (
                words[at + 1].startswith("--") or re.match(r"^-[A-Za-z]", words[at + 1])
            ):
                found[name] = words[at + 1]
                at += 1
            else:
                found[name] = True
        at += 1
    return found
