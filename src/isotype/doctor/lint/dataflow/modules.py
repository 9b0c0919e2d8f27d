"""What names mean beyond one function: functions of the file, functions of its package's other files, attributes set by `__init__`."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..files import read
from ..source import SourceFile, last_name
from .values import Closure, Env, Layer, Made, Scalar, Tensor


def module_functions(file: SourceFile) -> dict[str, ast.FunctionDef]:
    """Module-level functions by name, also those defined under an `if` or `try`; Triton kernels are left out."""
    if "functions" not in file.memo:
        found: dict[str, ast.FunctionDef] = {}
        for node in file.nodes(ast.FunctionDef):
            at_module_level = isinstance(file.parents[node], (ast.Module, ast.If, ast.Try)) and file.function_of(node) is None
            special = any(last_name(d) in ("jit", "autotune", "heuristics", "overload") for d in node.decorator_list)
            if at_module_level and not special:
                found[node.name] = node
        file.memo["functions"] = found
    return file.memo["functions"]


def resolve_function(file: SourceFile, name: str) -> Closure | None:
    """The function a name stands for: of this file, or imported from a file of the same package that can be found."""
    own = module_functions(file).get(name)
    if own is not None:
        return Closure(own, file, Env())
    dotted = file.imports.get(name, "")
    if "." not in dotted or dotted.startswith("torch."):
        return None
    module, _, function = dotted.rpartition(".")
    other = _file_of(file, module)
    if other is None or function not in module_functions(other):
        return None
    return Closure(module_functions(other)[function], other, Env())


def _file_of(file: SourceFile, module: str) -> SourceFile | None:
    """The file of a module named relative to this one, or by the name of a package that encloses it."""
    here = Path(file.path)
    if module.startswith("."):
        level = len(module) - len(module.lstrip("."))
        if level > len(here.parents):
            return None
        base = here.parents[level - 1]
        parts = [p for p in module.lstrip(".").split(".") if p]
    else:
        head, *parts = module.split(".")
        roots = [p for p in here.parents if p.name == head]
        if not roots:
            return None
        base = roots[0]
    target = base.joinpath(*parts)
    return _parsed(str(target.with_suffix(".py"))) if parts else None


@lru_cache(maxsize=64)
def _parsed(path: str) -> SourceFile | None:
    try:
        return SourceFile(path, read(Path(path)))
    except (OSError, SyntaxError, ValueError):
        return None


_KEEPS = {"Dropout", "GELU", "SiLU", "ReLU", "Tanh", "Sigmoid", "Identity", "Softmax", "LeakyReLU", "Hardswish", "Mish"}


def class_attributes(file: SourceFile, cls: ast.ClassDef, weights: str) -> dict[str, Any]:
    """What `self.NAME` is, as far as the class itself says: parameters, buffers, layers of torch.nn, plain numbers."""
    known = file.memo.setdefault("class_attributes", {})
    if (cls, weights) not in known:
        known[cls, weights] = _class_attributes(file, cls, weights)
    return dict(known[cls, weights])


def _class_attributes(file: SourceFile, cls: ast.ClassDef, weights: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in file.own(method):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and _is_self(node.targets[0]):
                name = node.targets[0].attr  # type: ignore[attr-defined]
                value = _attribute(file, node.value, name, weights)
                # two assignments that disagree: not followed
                found[name] = value if found.get(name, value) == value else None
            elif isinstance(node, ast.Call) and last_name(node.func) in ("register_buffer", "register_parameter") and node.args:
                name_node = node.args[0]
                if isinstance(name_node, ast.Constant) and isinstance(name_node.value, str) and not _is_none(node.args[1:2]):
                    kind = "buffer" if last_name(node.func) == "register_buffer" else "parameter"
                    found[name_node.value] = Tensor(weights, Made.PARAMETER, f"the {kind} self.{name_node.value}", node)
    return {name: value for name, value in found.items() if value is not None}


def _attribute(file: SourceFile, value: ast.expr, name: str, weights: str) -> Any:
    if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
        return Scalar()
    if not isinstance(value, ast.Call):
        return None
    made = file.dotted(value.func)
    if made in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
        return Tensor(weights, Made.PARAMETER, f"the parameter self.{name}", value)
    if made == "torch.nn.Linear":
        return Layer("linear", Tensor(weights, Made.PARAMETER, f"the weight of self.{name}", value))
    if made.startswith("torch.nn.") and made.rpartition(".")[2] in _KEEPS:
        return Layer("keep", Tensor(weights))
    return None


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_none(nodes: list[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant) and nodes[0].value is None
