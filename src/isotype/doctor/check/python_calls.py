"""Finds calls and their literal arguments in the syntax tree of a Python file or a notebook.
Nothing is executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .text_files import UnreadableError


class UnknownValue:
    """Represents a value that is known only after running the program."""


class DottedName(str):
    """A dotted name in the code (`torch.bfloat16`), as opposed to a string with the same text."""

    __slots__ = ()


@dataclass(slots=True)
class Call:
    name: str  # the last part of the dotted name: `TrainingArguments`, `from_pretrained`
    owner: str  # the part before it: `AutoModelForCausalLM`, `torch`, `trainer`
    line: int
    arguments: dict[str, tuple[Any, int]] = field(default_factory=dict)
    target: str = ""  # the variable to which the result is assigned
    is_conditional: bool = False  # runs only under a condition


def read_calls(text: str) -> list[Call]:
    """Returns every call in a program, in the order of its lines. Raises UnreadableError if the
    program cannot be parsed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        message = getattr(error, "msg", None) or str(error)
        raise UnreadableError(message, getattr(error, "lineno", None) or 1) from error
    constants = _single_assignments(tree)
    conditional_ids = _conditional_nodes(tree)
    targets = _call_targets(tree)
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = _read_call(node, constants)
            call.target = targets.get(id(node), "")
            call.is_conditional = id(node) in conditional_ids
            calls.append(call)
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Subscript):
                calls += _read_environment(node, target, constants)
            elif isinstance(target, ast.Attribute) and id(node) not in conditional_ids:
                calls += _read_attribute(node, target, constants)
    return sorted(calls, key=lambda call: call.line)


def _call_targets(tree: ast.Module) -> dict[int, str]:
    """Finds the assignments of a value to a single variable. Returns a dict from the id of the
    value's node to the name of the variable.
    """
    targets = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                targets[id(node.value)] = target.id
    return targets


def _read_environment(
    node: ast.Assign, target: ast.Subscript, constants: dict[str, ast.expr]
) -> Iterator[Call]:
    """Represents `os.environ["NAME"] = value` as a call named `environ`."""
    if _dotted_name(target.value) in ("os.environ", "environ"):
        name = str(_evaluate(target.slice, constants))
        value = _evaluate(node.value, constants)
        yield Call("environ", "os", node.lineno, {name: (value, node.lineno)})


def _read_attribute(
    node: ast.Assign, target: ast.Attribute, constants: dict[str, ast.expr]
) -> Iterator[Call]:
    """Represents `args.bf16 = True` as a call named `setattr`."""
    if isinstance(target.value, ast.Name):
        value = _evaluate(node.value, constants)
        arguments = {target.attr: (value, node.lineno)}
        yield Call("setattr", target.value.id, node.lineno, arguments)


def _read_call(node: ast.Call, constants: dict[str, ast.expr]) -> Call:
    owner, _, name = _dotted_name(node.func).rpartition(".")
    call = Call(name, owner, node.lineno)
    for index, argument in enumerate(node.args):
        if not isinstance(argument, ast.Starred):
            call.arguments[str(index)] = (_evaluate(argument, constants), argument.lineno)
    for keyword in node.keywords:
        value = _evaluate(keyword.value, constants)
        line = keyword.value.lineno
        if keyword.arg is not None:
            call.arguments[keyword.arg] = (value, line)
        elif isinstance(value, dict):  # **{"bf16": True}
            for key, item in value.items():
                call.arguments[str(key)] = (item, line)
    return call


def _conditional_nodes(tree: ast.Module) -> set[int]:
    """Returns the ids of the nodes inside branches and loops. The code of these nodes does not
    always run.
    """
    branches = (ast.If, ast.Try, ast.While, ast.For, ast.Match, ast.IfExp)
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, branches)
        for inner in ast.walk(node)
        if inner is not node
    }


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    return _dotted_name(node.func) if isinstance(node, ast.Call) else ""


def _single_assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns the values of the names that are assigned exactly once in the file. A name that is
    assigned only once has the same value wherever it is used.
    """
    values: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values[target.id] = None if target.id in values else node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
            is_constant = isinstance(node, ast.AnnAssign) and node.target.id not in values
            values[node.target.id] = node.value if is_constant else None
        elif isinstance(node, ast.arg | ast.For):
            name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            values[name] = None
    return {name: value for name, value in values.items() if value is not None}


def _evaluate(node: ast.expr, constants: dict[str, ast.expr], depth: int = 0) -> Any:
    """Evaluates an expression. The result is a constant, a dotted name as text (`torch.bfloat16`),
    a container of such values, or UnknownValue.
    """
    if depth > 8:
        return UnknownValue
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in constants:
            return _evaluate(constants[node.id], constants, depth + 1)
        return UnknownValue
    if isinstance(node, ast.Attribute):
        dotted = _dotted_name(node)
        if dotted.startswith(("torch.", "tf.", "jnp.")) and dotted.count(".") == 1:
            return DottedName(dotted)
        return UnknownValue
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _evaluate(node.operand, constants, depth + 1)
        return -inner if isinstance(inner, int | float) else UnknownValue
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item, constants, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _evaluate(key, constants, depth + 1): _evaluate(value, constants, depth + 1)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.Call):
        name = _dotted_name(node.func).rpartition(".")[2]
        if name == "dict":
            return {
                key.arg: _evaluate(key.value, constants, depth + 1)
                for key in node.keywords
                if key.arg
            }
        return {
            "__call__": name,
            **{
                key.arg: _evaluate(key.value, constants, depth + 1)
                for key in node.keywords
                if key.arg
            },
        }
    return UnknownValue


_COMMAND_PREFIXES = ("%", "!", "?")
# cells with other magics, such as `%%bash`, hold another language
_PYTHON_MAGICS = {"capture", "time", "timeit", "prun", "python", "python3"}


def _code_cells(data: Any) -> Iterator[list[str]]:
    """Returns the lines of each code cell of a notebook."""
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        return
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source")
        if isinstance(source, list):
            source = "".join(map(str, source))
        if isinstance(source, str):
            yield source.splitlines()


def read_notebook(text: str) -> tuple[str, Callable[[int | None], int | None]]:
    """Returns the code of a notebook, and a function that maps a line of this code to its line in
    the file. Lines with shell commands or magic commands become comments.

    Raises  UnreadableError
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"not a notebook: {error}", getattr(error, "lineno", 1)) from error
    code: list[str] = []
    line_numbers: list[int] = []
    position = 0
    for lines in _code_cells(data):
        magics = {
            line.split()[0][2:] for line in lines if line.startswith("%%") and line[2:].strip()
        }
        is_other_language = bool(magics - _PYTHON_MAGICS)
        continues_command = False
        for line in lines:
            encoded_line = json.dumps(line, ensure_ascii=False)[1:-1]
            if encoded_line.strip():
                offset = text.find(encoded_line, position)
                position = offset if offset >= 0 else position
            stripped_line = line.lstrip()
            indent = line[: len(line) - len(stripped_line)]
            # A comment needs no indentation. A command becomes `pass`, because it may be the only
            # statement of a block.
            is_comment = is_other_language or continues_command
            is_command = is_comment or stripped_line.startswith(_COMMAND_PREFIXES)
            # `!pip install \` continues on the next line
            continues_command = is_command and stripped_line.endswith("\\")
            if is_comment:
                code.append(f"# {stripped_line}")
            elif is_command:
                code.append(f"{indent}pass  # {stripped_line}")
            else:
                code.append(line)
            line_numbers.append(text.count("\n", 0, position) + 1)

    def notebook_line(line: int | None) -> int | None:
        if line is not None and 0 < line <= len(line_numbers):
            return line_numbers[line - 1]
        return line

    return "\n".join(code) + "\n", notebook_line
