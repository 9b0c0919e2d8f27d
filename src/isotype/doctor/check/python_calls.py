"""Calls and their plain arguments in a Python file or a notebook, found in its syntax tree; nothing
is executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .text_files import Unreadable


class Unknown:
    """A value that only running the program would tell."""


class Name(str):
    """A dotted name in the code (`torch.bfloat16`), as against a text that reads the same."""

    __slots__ = ()


@dataclass(slots=True)
class Call:
    name: str  # last part: `TrainingArguments`, `from_pretrained`
    owner: str  # what it is called on: `AutoModelForCausalLM`, `torch`, `trainer`
    line: int
    arguments: dict[str, tuple[Any, int]] = field(default_factory=dict)
    target: str = ""  # the variable that takes the result
    conditional: bool = False  # runs only under a condition


def read(text: str) -> list[Call]:
    """Every call, in the order of lines. Raises Unreadable."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unreadable(
            getattr(error, "msg", None) or str(error), getattr(error, "lineno", None) or 1
        ) from error
    names = _constants(tree)
    conditional = _conditional(tree)
    targets = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
    }
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            owner = _dotted(node.targets[0].value)
            if owner in ("os.environ", "environ"):
                key = _value(node.targets[0].slice, names)
                value = _value(node.value, names)
                calls.append(Call("environ", "os", node.lineno, {str(key): (value, node.lineno)}))
        if (
            isinstance(node, ast.Assign)
            and isinstance(target := node.targets[0], ast.Attribute)
            and isinstance(target.value, ast.Name)
            and id(node) not in conditional
        ):
            calls.append(
                Call(
                    "setattr",
                    target.value.id,
                    node.lineno,
                    {target.attr: (_value(node.value, names), node.lineno)},
                )
            )
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = _dotted(node.func).rpartition(".")
        call = Call(
            name,
            owner,
            node.lineno,
            target=targets.get(id(node), ""),
            conditional=id(node) in conditional,
        )
        for index, argument in enumerate(node.args):
            if not isinstance(argument, ast.Starred):
                call.arguments[str(index)] = (_value(argument, names), argument.lineno)
        for keyword in node.keywords:
            if keyword.arg is not None:
                call.arguments[keyword.arg] = (_value(keyword.value, names), keyword.value.lineno)
            elif isinstance(spread := _value(keyword.value, names), dict):
                call.arguments.update(
                    {str(k): (v, keyword.value.lineno) for k, v in spread.items()}
                )
        calls.append(call)
    return sorted(calls, key=lambda c: c.line)


def _conditional(tree: ast.Module) -> set[int]:
    """Statements that only run under a condition."""
    branches = (ast.If, ast.Try, ast.While, ast.For, ast.Match, ast.IfExp)
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, branches)
        for inner in ast.walk(node)
        if inner is not node
    }


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return _dotted(node.func) if isinstance(node, ast.Call) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names assigned exactly once in the file, so that their value is known wherever they are used."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = None if target.id in found else node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
            known = isinstance(node, ast.AnnAssign) and node.target.id not in found
            found[node.target.id] = node.value if known else None
        elif isinstance(node, ast.arg | ast.For):
            name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            found[name] = None
    return {name: value for name, value in found.items() if value is not None}


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """A constant, a dotted name as text (`torch.bfloat16`), a container of them, or Unknown."""
    if depth > 8:
        return Unknown
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in names:
            return _value(names[node.id], names, depth + 1)
        return Unknown
    if isinstance(node, ast.Attribute):
        dotted = _dotted(node)
        if dotted.startswith(("torch.", "tf.", "jnp.")) and dotted.count(".") == 1:
            return Name(dotted)
        return Unknown
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _value(node.operand, names, depth + 1)
        return -inner if isinstance(inner, int | float) else Unknown
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, names, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _value(k, names, depth + 1): _value(v, names, depth + 1)
            for k, v in zip(node.keys, node.values, strict=True)
            if isinstance(k, ast.Constant)
        }
    if isinstance(node, ast.Call):
        name = _dotted(node.func).rpartition(".")[2]
        if name == "dict":
            return {k.arg: _value(k.value, names, depth + 1) for k in node.keywords if k.arg}
        return {
            "__call__": name,
            **{k.arg: _value(k.value, names, depth + 1) for k in node.keywords if k.arg},
        }
    return Unknown


_NOT_PYTHON = ("%", "!", "?")
# `%%bash` and all others hold another language
_PYTHON_MAGICS = {"capture", "time", "timeit", "prun", "python", "python3"}


def read_notebook(text: str) -> tuple[str, Callable[[int | None], int | None]]:
    """-> the code, and the function from its lines to the notebook's. Shell and magic lines become
    comments. Raises Unreadable.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"not a notebook: {error}", getattr(error, "lineno", 1)) from error
    code: list[str] = []
    places: list[int] = []
    raw = text
    position = 0
    cells = data.get("cells") if isinstance(data, dict) else None
    for cell in cells if isinstance(cells, list) else []:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source")
        else:
            source = None
        if not isinstance(source, (str, list)):
            continue
        if isinstance(source, str):
            lines = source.splitlines()
        else:
            lines = "".join(map(str, source)).splitlines()
        magics = {
            line.split()[0][2:] for line in lines if line.startswith("%%") and line[2:].strip()
        }
        foreign = bool(magics - _PYTHON_MAGICS)
        continued = False
        for line in lines:
            written = json.dumps(line, ensure_ascii=False)[1:-1]
            at = raw.find(written, position) if written.strip() else position
            position = at if at >= 0 else position
            plain = line.lstrip()
            indent = line[: len(line) - len(plain)]
            # a comment needs no indentation; the first line of a command may be a block's only one
            within = foreign or continued
            shell = within or plain.startswith(_NOT_PYTHON)
            continued = shell and plain.endswith("\\")  # `!pip install \` goes on in the next line
            code.append(f"# {plain}" if within else f"{indent}pass  # {plain}" if shell else line)
            places.append(raw.count("\n", 0, position) + 1)

    def line_of(line: int | None) -> int | None:
        if line is not None and 0 < line <= len(places):
            return places[line - 1]
        return line

    return "\n".join(code) + "\n", line_of
