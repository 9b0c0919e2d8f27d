"""Where a value's dtype came from, read off a typed syntax tree: a load through a pointer, a scalar that promoted it, a cast.

A failed compilation (`Scene`) and what is found wrong with it (`Fault`) are described in these words.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Any

from ...finding import Severity
from .observe import Frame

LOW = ("bf16", "fp16")
FLOATS = ("fp64", "fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Origin:
    """The step that gave a value its dtype.

    kind  load, scalar (a float scalar promoted a block), promotion (two blocks), cast, call, parameter, constant
    text  a sentence's end: `loaded through x_ptr (*bf16)`
    """

    kind: str
    text: str
    line: int
    source: str
    name: str | None = None  # the scalar, pointer or parameter that decided it
    statistic: bool = False  # a load of one number a program, as of a row's maximum or sum, rather than of a block


def source_text(node: ast.AST) -> str:
    return ast.unparse(node)


def assigns(statement: ast.AST | None, name: str) -> bool:
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    else:
        return False
    return any(isinstance(n, ast.Name) and n.id == name for target in targets for n in ast.walk(target))


def names_in(node: ast.AST) -> list[str]:
    return list(dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name)))


def variable_of(node: ast.AST) -> str:
    """The name a reader would look for in an expression: `x` of `-x`, `x[:, None]` or `x.to(...)`; else the expression itself."""
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _is_module_call(node):
            node = node.func.value
        elif isinstance(node, ast.Call) and node.args and call_name(node) in ("trans", "load", "reshape", "permute", "view"):
            node = node.args[0]
        elif isinstance(node, ast.BinOp):
            node = node.left if names_in(node.left) else node.right
        else:
            return source_text(node)


def _is_module_call(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("tl", "libdevice", "math", "triton", "language")
    )


def call_name(node: ast.AST) -> str:
    """`dot` of `tl.dot(...)`."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def origin(frame: Frame, node: ast.AST, *, before: int | None = None, _depth: int = 0) -> Origin | None:
    """The step in this function that gave `node` its dtype; None where it cannot be determined.

    before  only bindings on earlier lines of the function count (a name may be bound again below)
    """
    here = frame.line(node)
    if _depth > 12:
        return None
    if isinstance(node, ast.Name):
        line = before if before is not None else getattr(node, "lineno", 10**9)
        wanted = frame.dtypes.get(node)
        for bound in reversed(frame.bindings):
            statement = bound.node
            if bound.name == node.id and assigns(statement, node.id) and getattr(statement, "lineno", 0) <= line:
                if wanted is not None and bound.dtype != wanted:
                    continue
                value = bound.value
                if value is None or (isinstance(value, ast.Name) and value.id == node.id):
                    continue
                found = origin(frame, value, before=getattr(statement, "lineno", line) - 1, _depth=_depth + 1)
                return found or Origin("value", f"`{source_text(value)}`", frame.line(statement), source_text(value))
        if node.id in frame.parameters:
            return Origin("parameter", f"parameter {node.id} ({frame.parameters[node.id]})", frame.first_line, node.id, node.id)
        return None
    if isinstance(node, ast.BinOp):
        return _binary(frame, node, node.left, node.right, frame.dtypes.get(node, "?"), _depth, before)
    if isinstance(node, (ast.UnaryOp, ast.Subscript)):
        return origin(frame, node.operand if isinstance(node, ast.UnaryOp) else node.value, before=before, _depth=_depth + 1)
    if isinstance(node, ast.IfExp):
        return origin(frame, node.body, before=before, _depth=_depth + 1)
    if isinstance(node, ast.Constant):
        return Origin("constant", f"the constant {source_text(node)}", here, source_text(node))
    if isinstance(node, ast.Call):
        return _call(frame, node, before, _depth)
    return None


def _described(node: ast.AST) -> str:
    return f"what is loaded through {variable_of(node)}" if call_name(node) == "load" else variable_of(node)


def _binary(
    frame: Frame, node: ast.AST, left: ast.AST, right: ast.AST, result: str, depth: int, before: int | None = None
) -> Origin | None:
    sides = {side: frame.dtypes.get(side) for side in (left, right)}
    for one, other in ((left, right), (right, left)):
        mine, theirs = sides[one], sides[other]
        if theirs == result and mine != result and mine in FLOATS:
            scalar = not frame.shapes.get(other) and bool(frame.shapes.get(one))
            kind = "scalar" if scalar else "promotion"
            what = f"the {theirs} scalar {source_text(other)}" if scalar else f"{source_text(other)}, which is {theirs}"
            text = f"`{source_text(node)}` promotes {_described(one)} from {mine} to {result}: it meets {what}"
            return Origin(kind, text, frame.line(node), source_text(node), variable_of(other))
    for side in (left, right):
        if sides[side] == result and not isinstance(side, ast.Constant):
            return origin(frame, side, before=before, _depth=depth + 1)
    return None


def _call(frame: Frame, node: ast.Call, before: int | None, depth: int) -> Origin | None:
    here, name, result = frame.line(node), call_name(node), frame.dtypes.get(node, "?")
    if name == "load" and node.args:
        pointer = frame.dtypes.get(node.args[0], "")
        parameter = next((n for n in names_in(node.args[0]) if frame.parameters.get(n, "").startswith("*")), None)
        through = parameter or variable_of(node.args[0])
        return Origin(
            "load",
            f"loaded through {through} ({pointer or result}) without a cast",
            here,
            source_text(node),
            through,
            not frame.shapes.get(node),
        )
    if name in ("to", "cast"):
        return Origin("cast", f"cast by `{source_text(node)}`", here, source_text(node))
    if name in ("zeros", "full"):
        return Origin("cast", f"made as {result} by `{source_text(node)}`", here, source_text(node))
    if name == "dot":
        return Origin("call", f"the result of `{source_text(node)}`", here, source_text(node))
    for argument in [*node.args, *(k.value for k in node.keywords)]:
        if frame.dtypes.get(argument) == result and (found := origin(frame, argument, before=before, _depth=depth + 1)):
            return found
    return Origin("call", f"the result of `{source_text(node)}`", here, source_text(node))


@dataclass(frozen=True)
class Fault:
    """What `check` turns into a Finding, once for all the combinations that show it."""

    code: str
    file: str
    line: int
    kernel: str
    variable: str
    message: str
    cause: str
    fix: str
    dtypes: tuple[str, str] | tuple[str] | tuple[()] = ()
    facts: tuple[tuple[str, str], ...] = field(default=())
    is_dtype: bool = True  # whether the failure is about dtypes at all
    statistic: bool = False  # whether the value at fault is one loaded number a program
    severity: Severity | None = None  # None: decided by how reachable the combination is


@dataclass(frozen=True)
class Scene:
    """A failure as the recognisers see it: the innermost function of the user's, the node at which it stopped, the message."""

    frame: Frame
    node: ast.AST
    message: str
    kernel: str

    def fault(self, code: str, variable: str, message: str, *, cause: str, fix: str, line: int | None = None, **more: Any) -> Fault:
        place = self.frame.line(self.node) if line is None else line
        return Fault(code, self.frame.file, place, self.kernel, variable, message, cause, fix, **more)

    def at(self, found: Origin | None) -> str:
        """` (case.py:12)` of an origin."""
        return f" ({self.frame.file.rsplit('/', 1)[-1]}:{found.line})" if found else ""


def scalar_word(text: str) -> str:
    """`fp32` of `fp32[constexpr[256]]` (Triton 3.9) and of `<[256], fp32>` (older)."""
    text = text.strip()
    if old := re.fullmatch(r"<\[.*\], *(.+)>", text):
        return old[1]
    return {"int1": "bool"}.get(word := re.split(r"\[", text, maxsplit=1)[0], word)


def origin_facts(scene: Scene, *found: Origin | None) -> tuple[tuple[str, str], ...]:
    return tuple(("comes from", f"{o.text}{scene.at(o)}") for o in found if o is not None)
