"""Where two parts of one running sum are subtracted from each other."""

from __future__ import annotations

import ast

from ..source import Function, SourceFile, bindings, last_name

_VIEWS = frozenset({"unsqueeze", "transpose", "permute", "flip", "roll", "narrow", "select", "expand", "view", "reshape"})


def differences(file: SourceFile, function: Function) -> dict[ast.Call, ast.BinOp]:
    """Each `name = x.cumsum(...)` of a function with the first difference of two parts of `name`: `name[..., None] - name[..., 1:]`."""
    if "cumsum" not in file.text:
        return {}
    made: dict[str, ast.Call] = {}
    for node in file.own(function):
        for target, value in bindings(node):
            if isinstance(target, ast.Name) and isinstance(value, ast.Call) and last_name(value.func) == "cumsum":
                made[target.id] = value
    found: dict[ast.Call, ast.BinOp] = {}
    for node in file.own(function) if made else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            name = _part_of(node.left)
            if name in made and _part_of(node.right) == name:
                found.setdefault(made[name], node)
    return found


def _part_of(node: ast.expr) -> str:
    """`total` for `total[..., None]`, `total.unsqueeze(-1)` and their like; "" for anything else, or for the name itself."""
    inside = node
    while not isinstance(inside, ast.Name):
        if isinstance(inside, ast.Subscript):
            inside = inside.value
        elif isinstance(inside, ast.Call) and isinstance(inside.func, ast.Attribute) and inside.func.attr in _VIEWS:
            inside = inside.func.value
        else:
            return ""
    return inside.id if inside is not node else ""
