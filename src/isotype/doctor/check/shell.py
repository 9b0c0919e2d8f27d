"""Assignments and commands of a shell script or an env file.

No shell is run: quotes, `export`, `+=`, `${NAME}`, `${NAME:-default}` and continued lines are
interpreted; `$(...)` is left as it is written.
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
    """What a script assigns and runs.

    variables  the last value of each
    commands   the arguments and the line of each
    prefixed   assignments written before a command, which hold only for it
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


def read_script(text: str) -> Script:
    """Parses a script as a shell does: `;`, `&&`, `|` and line breaks separate commands."""
    script = Script()
    # a word without quotes, whether single quotes kept it from expansion
    argv: list[tuple[str, bool]] = []
    argument = None
    is_single_quoted = False
    is_skipped = False
    line = 1
    first_line = 1
    for token in _TOKEN.finditer(text + "\n\n"):  # the last line may end in a backslash
        kind = str(token.lastgroup)
        if kind in ("single", "double", "plain"):
            if not argv and argument is None:
                first_line = line
            piece = token[kind].replace("\\\n", " ")
            if kind == "double":
                piece = piece.replace('\\"', '"')
            argument = (argument or "") + piece
            is_single_quoted = is_single_quoted or kind == "single"
        elif argument is not None:
            argv.append((argument, is_single_quoted))
            argument = None
            is_single_quoted = False
        if kind == "end" and argv:
            is_skipped = is_skipped or argv[0][0] in _COMPOUND
            if not is_skipped:
                _read_command(script, argv, first_line)
            argv = []
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


def _read_command(script: Script, raw_argv: list[tuple[str, bool]], line: int) -> None:
    argv: list[str] = []
    pending: list[Assignment] = []
    exported = False
    for raw, is_single_quoted in raw_argv:
        value = raw if is_single_quoted else _expand_variables(script, raw)
        if not argv and (match := _ASSIGNMENT.match(value)):
            new_value = match["value"]
            previous = script.variables.get(match["name"])
            if previous and match["plus"]:
                new_value = previous.value + new_value
            pending.append(Assignment(match["name"], new_value, line))
        elif not argv and value in ("export", "declare", "-x", "env", "set"):
            exported = True
        elif is_single_quoted or " " in raw:
            argv.append(value)
        else:  # an expanded variable may hold several arguments
            argv += value.split() if re.search(r"\s", value) else [value]
    target = script.prefixed if argv and not exported else script.variables
    for assignment in pending:
        target[assignment.name] = assignment
    if argv:
        script.commands.append((argv, line))


def parse_options(argv: list[str]) -> dict[str, str | bool]:
    """`--name value`, `--name=value`, `--flag` -> name (dashes as underscores) to value; a flag
    without a value is True.
    """
    options: dict[str, str | bool] = {}
    index = 0
    while index < len(argv):
        argument = argv[index]
        if argument.startswith("-") and len(argument) > 1 and not re.match(r"^-\d", argument):
            name, equals, value = argument.lstrip("-").partition("=")
            name = name.replace("-", "_")
            if equals:
                options[name] = value
            elif index + 1 < len(argv) and not (
                argv[index + 1].startswith("--") or re.match(r"^-[A-Za-z]", argv[index + 1])
            ):
                options[name] = argv[index + 1]
                index += 1
            else:
                options[name] = True
        index += 1
    return options
