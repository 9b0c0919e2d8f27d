"""What the launch sites in a kernel's own file say about its arguments: `kernel[grid](x, lse, x.stride(0), BLOCK=128)`.

A buffer that the launcher makes with a dtype of its own (`torch.empty(..., dtype=torch.float32)`) has that dtype whatever the caller
passes; `x.stride(0)`, `x.shape[1]` and `x.numel()` are integers; literals are what they are.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from .unwrap import place_of

_POINTER_WORD = {
    "int64": "*i64", "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1", "fp64": "*fp64", "fp32": "*fp32",
    "bf16": "*bf16", "fp16": "*fp16",
}  # fmt: skip
_MAKERS = (
    "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "arange", "to",
    "float", "tensor",
)  # fmt: skip
_FLOAT_NAMES = ("eps", "scale", "alpha", "softcap", "dropout_p", "beta", "temperature")


@dataclass
class WrittenLaunch:
    """One launch as written.

    dtypes     pointer parameter -> `*fp32`, where the launcher itself fixes the dtype
    scalars    parameter -> `i32`, `fp32`
    constants  parameter -> literal
    """

    line: int
    dtypes: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


def written_launches(function: Any, source: ast.AST | None = None) -> list[WrittenLaunch]:
    """The launches of `function` in its own file."""
    tree = source if source is not None else _tree(function)
    if tree is None:
        return []
    found = []
    for scope in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]:
        made = _made_in(scope)
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and _is(call.func.value, function.__name__):
                found.append(_read(function, call, made))
    return found


def _is(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _tree(function: Any) -> ast.AST | None:
    try:
        with open(place_of(function)[0], encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _made_in(scope: ast.AST) -> dict[str, str | None]:
    """Local tensors and the dtype the function itself gives them; None where two assignments disagree."""
    made: dict[str, str | None] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, word = node.targets[0].id, _fixed_dtype(node.value)
            made[name] = word if name not in made or made[name] == word else None
    return made


def _fixed_dtype(value: ast.AST) -> str | None:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr not in _MAKERS:
        return None
    if value.func.attr == "float" and not value.args:
        return "*fp32"
    candidates = [k.value for k in value.keywords if k.arg == "dtype"] + (list(value.args) if value.func.attr == "to" else [])
    for one in candidates:
        if isinstance(one, ast.Attribute) and _is(one.value, "torch"):
            try:
                return _POINTER_WORD.get(parse(one.attr))
            except ValueError:
                return None
    if not candidates and value.func.attr in ("empty", "zeros", "ones") and _is(value.func.value, "torch"):
        return "*fp32"  # torch's default dtype
    return "*i64" if value.func.attr == "arange" and not candidates else None


def _read(function: Any, call: ast.Call, made: dict[str, str | None]) -> WrittenLaunch:
    launch = WrittenLaunch(call.lineno)
    passed = dict(zip(function.arg_names, call.args)) if not any(isinstance(a, ast.Starred) for a in call.args) else {}
    passed |= {k.arg: k.value for k in call.keywords if k.arg in function.arg_names and k.arg}
    for name, value in passed.items():
        if isinstance(value, ast.Name) and made.get(value.id):
            launch.dtypes[name] = str(made[value.id])
        elif fixed := _fixed_dtype(value):
            launch.dtypes[name] = fixed
        elif isinstance(value, ast.Constant):
            launch.constants[name] = value.value
            if type(value.value) is float:
                launch.scalars[name] = "fp32"
            elif type(value.value) is int:
                launch.scalars[name] = "i32"
        elif _is_size(value):
            launch.scalars[name] = "i32"
        elif any(w in name.lower() for w in _FLOAT_NAMES) and "stride" not in name.lower():
            launch.scalars[name] = "fp32"
    return launch


def _is_size(value: ast.AST) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr in ("stride", "numel", "size", "dim")
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute) and value.value.attr in ("shape", "strides")
