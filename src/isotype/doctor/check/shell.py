"""Reads the assignments and commands of a shell script or an env file.

No shell is started. The module itself interprets quotes, `export`, `+=`, `${NAME}`,
`${NAME:-default}` and continued lines. It does not replace `$(...)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

_ASSIGNMENT = re.compile(
    r"^(?:export\s+|declare\s+-x\s+|set\s+)?(?P<name>[A-Za-z_]\w*)(?P<plus>\+?)=(?P<value>.*)$",
    re.S,
)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<bare>[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment of a shell variable, `NAME=value`."""

    name: str
    value: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a script, with the line of each of its arguments."""

    arguments: list[str]
    lines: list[int]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, `--name value ...`. A flag has no values."""

    name: str
    values: tuple[str, ...]
    line: int

    @property
    def value(self) -> str | bool:
        return self.values[0] if self.values else True


@dataclass(slots=True)
class Script:
    """The assignments and commands of a script.

    variables  the last assignment of each variable
    prefixed   assignments that precede a command on its line and apply only to it
    """

    variables: dict[str, Assignment] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    prefixed: dict[str, Assignment] = field(default_factory=dict)


_TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;&|])\#[^\n]*)|(?P<blank>(?:[^\S\n]|\\\n)+)|(?P<end>[;&|\n])"""
    r"""|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<plain>(?:(?!\\\n)[^\s'";&|])+|.)""",
    re.S,
)


@dataclass(slots=True)
class _ShellWord:
    """A word of a command, without its quotes.

    is_single_quoted  whether single quotes prevent the expansion of variables in the word
    """

    text: str
    line: int
    is_single_quoted: bool = False


# lines that begin with these words are skipped
_COMPOUND = {"if", "then", "else", "fi", "for", "do", "done", "while", "function", "case", "esac"}


def read_script(text: str) -> Script:
    """Parses a script as a shell does. Commands are separated by `;`, `&&`, `|` and line breaks."""
    script = Script()
    shell_words: list[_ShellWord] = []
    shell_word: _ShellWord | None = None
    is_skipped = False
    line = 1
    for token in _TOKEN.finditer(text + "\n\n"):  # the last line may end in a backslash
        kind = str(token.lastgroup)
        if kind in ("single", "double", "plain"):
            shell_word = shell_word or _ShellWord("", line)
            piece = token[kind].replace("\\\n", " ")
            if kind == "double":
                piece = piece.replace('\\"', '"')
            shell_word.text += piece
            shell_word.is_single_quoted = shell_word.is_single_quoted or kind == "single"
        elif shell_word is not None:
            shell_words.append(shell_word)
            shell_word = None
        if kind == "end" and shell_words:
            is_skipped = is_skipped or shell_words[0].text in _COMPOUND
            if not is_skipped:
                _read_command(script, shell_words)
            shell_words = []
        is_skipped = is_skipped and token[0] != "\n"
        line += token[0].count("\n")
    return script


def _expand_variables(script: Script, text: str) -> str:
    def lookup(match: re.Match[str]) -> str:
        name = match["name"] or match["bare"]
        if name in script.variables:
            return script.variables[name].value
        if match["default"] is not None:
            return match["default"]
        return ""

    return _VARIABLE.sub(lookup, text)


def _read_command(script: Script, shell_words: list[_ShellWord]) -> None:
    command = Command([], [])
    pending: list[Assignment] = []
    exported = False
    for shell_word in shell_words:
        value = (
            shell_word.text
            if shell_word.is_single_quoted
            else _expand_variables(script, shell_word.text)
        )
        if not command.arguments and (match := _ASSIGNMENT.match(value)):
            new_value = match["value"]
            previous = script.variables.get(match["name"])
            if previous and match["plus"]:
                new_value = previous.value + new_value
            pending.append(Assignment(match["name"], new_value, shell_word.line))
        elif not command.arguments and value in ("export", "declare", "-x", "env", "set"):
            exported = True
        else:
            parts = [value]
            # an expanded variable may hold several arguments
            if (
                not shell_word.is_single_quoted
                and " " not in shell_word.text
                and re.search(r"\s", value)
            ):
                parts = value.split()
            command.arguments.extend(parts)
            command.lines.extend([shell_word.line] * len(parts))
    target = script.prefixed if command.arguments and not exported else script.variables
    for assignment in pending:
        target[assignment.name] = assignment
    if command.arguments:
        script.commands.append(command)


def read_options(arguments: Sequence[str], lines: Sequence[int] = ()) -> list[Option]:
    """Reads the options of a command line, which may have the form `--name value`, `--name=value`,
    `--name a b` or `--flag`. Dashes in names become underscores.

    lines  the line number of each argument
    """
    options: list[Option] = []
    position = 0
    while position < len(arguments):
        start = position
        position += 1
        if not _is_option(arguments[start]):
            continue
        name, equals, value = arguments[start].lstrip("-").partition("=")
        if equals:
            values = [value]
        else:
            following = arguments[position:]
            values = list(takewhile(lambda argument: not _is_option(argument), following))
            position += len(values)
        line = lines[start] if lines else 0
        options.append(Option(name.replace("-", "_"), tuple(values), line))
    return options


def _is_option(argument: str) -> bool:
    return argument.startswith("--") or bool(re.match(r"^-[A-Za-z]", argument))


def parse_options(arguments: Sequence[str]) -> dict[str, str | bool]:
    """Returns a dict that maps the name of each option on a command line to its first value. A flag
    without a value is True.
    """
    return {option.name: option.value for option in read_options(arguments)}
