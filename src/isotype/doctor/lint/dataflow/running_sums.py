"""Where entries of one running sum are subtracted from each other."""

from __future__ import annotations

import ast

from ..source import Function, SourceFile, bindings, last_name

_VIEWS = frozenset({"unsqueeze", "transpose", "permute", "flip", "roll", "narrow", "select", "expand", "view", "reshape"})


def differences(file: SourceFile, function: Function) -> dict[ast.Call, ast.BinOp]:
    """Each `name = x.cumsum(...)` of a function with the first difference of its entries: `name[..., -1:] - name`."""
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
            name = _viewed(node.left)
            if name in made and _viewed(node.right) == name and not (isinstance(node.left, ast.Name) and isinstance(node.right, ast.Name)):
                found.setdefault(made[name], node)
    return found


def _viewed(node: ast.expr) -> str:
    """`total` for itself, `total[..., None]`, `total.unsqueeze(-1)` and their like; "" for anything else."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
            node = node.func.value
        else:
            return ""
    return node.id
