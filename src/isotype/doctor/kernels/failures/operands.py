"""An operation that does not take its operands' dtypes (KN008)."""

from __future__ import annotations

import ast
import re

from ..fault import Fault
from ..provenance import origin, source_text, variable_of
from .scene import Scene

_REFUSED = re.compile(
    r"invalid operands? of type|unexpected type|[Ii]ncompatible|Unexpected dtype|cannot (?:convert|cast|be)|wrong type argument|dtype|"
    r"[Mm]ust be (?:an )?int|should be (?:an )?int|integer|element type|Unsupported (?:lhs|rhs)|not support|must all be ints|type mismatch|"
    r"Invalid argument .*cast|bitcast|precision"
)


def refused_operands(scene: Scene) -> Fault | None:
    """An operation that does not take these dtypes: `%` on floats, `&` on a float, a float index, pointer arithmetic with a float."""
    if not _REFUSED.search(scene.message) or re.search(r"block type|shape", scene.message):
        return None
    parts = typed_operands(scene)
    seen = [(variable_of(n), scene.frame.dtypes[n]) for n in parts if not scene.frame.dtypes[n].startswith("constexpr")]
    if not seen:
        return None
    odd = next((pair for pair in seen if pair[1] in ("fp64", "fp32", "bf16", "fp16")), seen[0])
    text = source_text(scene.node).splitlines()[0]
    listed = ", ".join(f"{name} {word}" for name, word in seen)
    where = next((origin(scene.frame, n) for n in parts if variable_of(n) == odd[0]), None)
    cause = f"`{text}` does not take {listed}: {scene.message}"
    cause += f"; {odd[0]}: {where.text}{scene.at(where)}" if where else ""
    fix = f"cast {odd[0]} before it, or change the dtype that {where.name if where and where.name else odd[0]} is passed in"
    return scene.fault("KN008", odd[0], f"`{text}` refuses {listed}", cause=cause, fix=fix, dtypes=tuple(w for _, w in seen[:2]))


def typed_operands(scene: Scene) -> list[ast.AST]:
    """The typed operands of the expression or loop at which Triton stopped."""
    node = scene.node.iter if isinstance(scene.node, ast.For) else scene.node
    return [n for n in ast.walk(node) if n in scene.frame.dtypes and n is not scene.node and not _inside_other(n, node, scene)]


def _inside_other(part: ast.AST, whole: ast.AST, scene: Scene) -> bool:
    typed = [n for n in ast.walk(whole) if n in scene.frame.dtypes and n is not whole and n is not part]
    return any(part in ast.walk(other) for other in typed)
