"""Functions of one file that do the same, and calls of one module: one with a cast, the other without."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.plain import PURE
from ..rule import Hit
from ..source import Function, SourceFile, last_name
from .low_dtypes import is_upcast

# resampling and normalising functions that are mended by a cast of the argument before
_IN_FP32 = frozenset({"interpolate", "grid_sample", "softmax", "log_softmax", "logsumexp", "layer_norm", "cumsum", "cdist"})
_SAYS_DTYPE = re.compile(r"fp32|float32|fp16|bf16|half|upcast|precision|low")
_MODULES = re.compile(r"(transformer|unet|vae|encoder|decoder|model|net|head|proj)$")
COMMON = 6  # letters at the beginning of the names of two twins


def twin_functions(file: SourceFile) -> Iterator[Hit]:
    """Of functions whose names begin alike and that call the same function on the same argument, those that do not cast it."""
    found: list[tuple[Function, str, ast.Call, bool]] = []  # the function, its argument, the call, whether the argument was cast before
    for function in file.functions():
        arguments = {a.arg for a in function.args.args}
        casts = {n.args[0] if n.args else n for n in file.own(function) if isinstance(n, ast.Call) and is_upcast(file, n)}
        for call in (n for n in file.own(function) if isinstance(n, ast.Call) and n.args and last_name(n.func) in _IN_FP32):
            names = {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)} & arguments
            for name in sorted(names):
                cast = any(name in {n.id for n in ast.walk(c) if isinstance(n, ast.Name)} for c in casts)
                found.append((function, name, call, cast))
    for function, name, call, cast in found:
        if cast or _SAYS_DTYPE.search(function.name) or any(f is function and n == name and c for f, n, _, c in found):
            continue
        for other, its_name, its_call, its_cast in found:
            same = its_cast and its_name == name and last_name(its_call.func) == last_name(call.func)
            if same and other is not function and not _SAYS_DTYPE.search(other.name) and _alike(file, function, other):
                yield Hit(
                    node=call,
                    message=f"`{name}` is not cast to fp32 before {last_name(call.func)}, as {other.name} does in line {other.lineno}",
                    cause=f"{other.name} casts `{name}` and calls the same function; bf16 or fp16 that comes there comes here as well",
                    fix=f"cast `{name}` to torch.float32 before, and the result back",
                    scenario=PURE,
                    reached=f"{other.name} in line {other.lineno} reckons with low precision",
                )
                break


def _alike(file: SourceFile, one: Function, other: Function) -> bool:
    """Whether the functions stand side by side and their names begin alike."""
    return file.parents.get(one) is file.parents.get(other) and one.name[:COMMON] == other.name[:COMMON] and len(one.name) >= COMMON


def twin_calls(file: SourceFile) -> Iterator[Hit]:
    """Calls of one module in one function or class with the same name as argument, which one of them casts."""
    scopes: dict[ast.AST, list[ast.Call]] = {}
    for call in file.nodes(ast.Call):
        if isinstance(call.func, (ast.Attribute, ast.Name)) and _MODULES.search(_module_of(call)):
            scopes.setdefault(_scope(file, call), []).append(call)
    for calls in scopes.values():
        groups: dict[tuple[str, str], list[tuple[ast.Call, ast.expr]]] = {}
        for call in calls:
            for key, value in [("", call.args[0])] if call.args else []:
                groups.setdefault((ast.unparse(call.func), f"{key}{_bare_name(value)}"), []).append((call, value))
            for item in call.keywords:
                groups.setdefault((ast.unparse(call.func), f"{item.arg}={_bare_name(item.value)}"), []).append((call, item.value))
        for (module, _), pairs in groups.items():
            cast = next((pair for pair in pairs if _is_cast(pair[1])), None)
            bare = next((pair for pair in pairs if isinstance(pair[1], ast.Name)), None)
            if cast is None or bare is None or _cast_by_assignment(file, bare[0], bare[1].id):  # type: ignore[attr-defined]  # the bare twin was chosen as a Name
                continue
            yield Hit(
                node=bare[0],
                message=f"{module} gets `{file.snippet(bare[1], 30)}` as it is, and `{file.snippet(cast[1], 40)}` in line {cast[0].lineno}",
                cause="the same module is called with the same argument, cast in one place and not in the other: where the cast is needed, "
                "this call raises or computes in another dtype",
                fix="cast in both places, or where the argument is made",
                scenario=PURE,
                reached=f"the call in line {cast[0].lineno} reckons with another dtype",
            )


def _scope(file: SourceFile, node: ast.AST) -> ast.AST:
    """The outermost class or function around it."""
    found: ast.AST = file.tree
    current: ast.AST | None = node
    while current is not None:
        if isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found = current
        current = file.parents.get(current)
    return found


def _module_of(call: ast.Call) -> str:
    """`self.vae.decode(x)` and `self.vae(x)` -> vae."""
    func = call.func
    if isinstance(func, ast.Attribute) and func.attr in ("decode", "encode"):
        return last_name(func.value)
    return last_name(func)


def _bare_name(value: ast.expr) -> str:
    """The name that is handed over, through a cast of it; "" for anything else."""
    if _is_cast(value):
        value = value.func.value  # type: ignore[attr-defined]  # a cast is a method call
    return value.id if isinstance(value, ast.Name) else ""


def _is_cast(value: ast.expr) -> bool:
    """`x.to(dtype)`, where x is a name."""
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.attr == "to"
        and any("dtype" in ast.unparse(a) or "float" in ast.unparse(a) for a in (*value.args, *(k.value for k in value.keywords)))
    )


def _cast_by_assignment(file: SourceFile, call: ast.Call, name: str) -> bool:
    """Whether the function around the call casts the name somewhere before it."""
    function = file.function_of(call)
    assignments = (n for n in file.own(function or file.tree) if isinstance(n, ast.Assign) and n.lineno < call.lineno)
    return any(
        isinstance(t, ast.Name) and t.id == name and any(w in ast.unparse(n.value) for w in ("dtype", ".to(", ".float(", ".half("))
        for n in assignments
        for t in n.targets
    )
