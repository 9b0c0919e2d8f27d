"""What names mean beyond one function: functions of the file, functions of its package's other files, attributes set by `__init__`."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from ....dtypes import parse
from ..files import read
from ..source import SourceFile, bindings, keyword, last_name
from .events import Scenario
from .values import Closure, Env, Items, Layer, Made, Scalar, Tensor


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
    functions: dict[str, ast.FunctionDef] = file.memo["functions"]
    return functions


def module_constants(file: SourceFile) -> dict[str, ast.expr]:
    """Numbers, texts and dtypes that the module binds to a name, once: `EPS = 1e-6`, `DTYPE = torch.bfloat16`."""
    if "constants" not in file.memo:
        found: dict[str, list[ast.expr]] = {}
        for node in file.tree.body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
        file.memo["constants"] = {name: values[0] for name, values in found.items() if len(values) == 1 and _is_plain(file, values[0])}
    constants: dict[str, ast.expr] = file.memo["constants"]
    return constants


def _is_plain(file: SourceFile, node: ast.expr) -> bool:
    """Also `product = functools.partial(torch.matmul, ...)`."""
    if isinstance(node, ast.Call) and file.dotted(node.func) == "functools.partial":
        return True
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and file.dotted(node).startswith("torch."))


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


_LAYERS = {
    "Linear": "linear", "Conv1d": "linear", "Conv2d": "linear", "Conv3d": "linear", "ConvTranspose2d": "linear",
    "Embedding": "embedding", "LayerNorm": "norm", "RMSNorm": "norm", "GroupNorm": "norm",
}  # fmt: skip
_KEEPS = {"Dropout", "GELU", "SiLU", "ReLU", "Tanh", "Sigmoid", "Identity", "Softmax", "LeakyReLU", "Hardswish", "Mish"}


def class_attributes(file: SourceFile, cls: ast.ClassDef, scenario: Scenario) -> dict[str, Any]:
    """What `self.NAME` is, as far as the class itself says: parameters, buffers, layers of torch.nn, plain numbers.

    fp32 weights beside bf16 inputs without autocast are a norm's: the layers of such a model have the inputs' dtype.
    """
    key = (cls, scenario.weights, scenario.weights if scenario.autocast else scenario.inputs)
    known = file.memo.setdefault("class_attributes", {})
    if key not in known:
        known[key] = _class_attributes(file, *key)
    return dict(known[key])


def _class_attributes(file: SourceFile, cls: ast.ClassDef, weights: str, layers: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in cls.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        for node in file.own(method):
            if isinstance(node, ast.Assign):
                for target, bound in bindings(node):
                    if _is_self(target):
                        name = target.attr
                        value = _attribute(file, bound, name, weights, layers)
                        # two assignments that disagree: not followed
                        found[name] = value if found.get(name, value) == value else None
            elif isinstance(node, ast.Call) and last_name(node.func) in ("register_buffer", "register_parameter") and node.args:
                name_node = node.args[0]
                if isinstance(name_node, ast.Constant) and isinstance(name_node.value, str) and not _is_none(node.args[1:2]):
                    kind = "buffer" if last_name(node.func) == "register_buffer" else "parameter"
                    made = node.args[1] if len(node.args) > 1 else None
                    written = _written_dtype(file, keyword(made, "dtype")) if isinstance(made, ast.Call) else None
                    narrow = weights == "fp32" and written in ("bf16", "fp16")  # what is written low stays so until a cast of the model
                    word = written if narrow else weights
                    found[name_node.value] = Tensor(word, Made.PARAMETER, f"the {kind} self.{name_node.value}", node)
    return {name: value for name, value in found.items() if value is not None}


def _attribute(file: SourceFile, value: ast.expr, name: str, weights: str, layer_weights: str) -> Any:
    if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
        return Scalar()
    if not isinstance(value, ast.Call):
        return None
    made = file.dotted(value.func)
    if made in ("torch.nn.Parameter", "torch.nn.parameter.Parameter"):
        return Tensor(weights, Made.PARAMETER, f"the parameter self.{name}", value)
    if made in ("torch.zeros", "torch.empty", "torch.ones", "torch.full", "torch.randn"):  # no buffer: the model's casts pass it by
        word = _written_dtype(file, keyword(value, "dtype"))
        return Tensor(word, Made.LITERAL, f"self.{name}, made by `{file.snippet(value, 48)}`", value) if word else None
    if made == "torch.nn.ModuleList":
        layers = [_layer(file, element, name, layer_weights) for element in _elements(value)]
        return Items(each=layers[0]) if layers and layers[0] and all(layer.kind == layers[0].kind for layer in layers if layer) else None
    return _layer(file, value, name, layer_weights)


def _written_dtype(file: SourceFile, node: ast.expr | None) -> str | None:
    head, _, word = file.dotted(node).rpartition(".")
    try:
        return parse(word) if head == "torch" else None
    except ValueError:
        return None


def _layer(file: SourceFile, value: ast.expr, name: str, weights: str) -> Layer | None:
    """The layer of torch.nn that this call makes, if it is one whose dtypes are simple."""
    made = file.dotted(value.func) if isinstance(value, ast.Call) else ""
    head, _, kind = made.rpartition(".")
    if head != "torch.nn":
        return None
    weight = Tensor(weights, Made.PARAMETER, f"the weight of self.{name}", value)
    if kind in _KEEPS:
        return Layer("keep", Tensor(weights))
    if kind == "Sequential":
        parts = [_layer(file, element, name, weights) for element in _elements(value)]
        kinds = {part.kind if part else "unknown" for part in parts}
        return Layer("linear", weight) if kinds <= {"linear", "keep"} and "linear" in kinds else None
    return Layer(_LAYERS[kind], weight) if kind in _LAYERS else None


def _elements(call: ast.expr) -> list[ast.expr]:
    """What a ModuleList or Sequential is made of: its arguments, or those of its list or comprehension."""
    assert isinstance(call, ast.Call)
    found: list[ast.expr] = []
    for argument in call.args:
        if isinstance(argument, (ast.List, ast.Tuple)):
            found += argument.elts
        elif isinstance(argument, (ast.ListComp, ast.GeneratorExp)):
            found.append(argument.elt)
        else:
            found.append(argument)
    return found


def _is_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_none(nodes: list[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant) and nodes[0].value is None
