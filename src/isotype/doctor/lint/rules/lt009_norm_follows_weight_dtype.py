from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.arguments import ACTIVATION, GRADIENT, WEIGHT, tensor_uses
from ..dataflow.plain import FP32_WEIGHTS, is_root, plain_events
from ..dataflow.values import Items, Made, Tensor
from ..rule import Hit, Rule
from ..source import Function, SourceFile, last_name
from .evidence import details, first_of_each

# any attribute of self, but of arguments only this exact name: `label_weight` weights losses
_SCALES = re.compile(r"self\.\w*(weight|scale|gamma|gain|beta|bias|[gwb])$|argument (weight|scale|gamma|gain|beta|bias|[gwb])$")

_REFERENCE = re.compile(r"_ref(erence)?$")
_SPARES_PRECISION = re.compile(r"fp32|float32|upcast|safer?_(fp|bf)16")


class NormFollowsWeightDtype(Rule):
    """a norm casts its input back and then multiplies with a weight that may be fp32

    Why
    ---
    Norm weights are often kept in fp32 (`prepare_model_for_kbit_training` casts them). `self.weight * x.to(input_dtype)` is then fp32
    whatever the input was: the whole residual stream becomes fp32, attention gets a query and a key of different dtypes, and the first
    plain Linear with bf16 weights raises, typically in `generate`, where no autocast hides it.

    Example
    -------
    ```python
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * x.to(input_dtype)
    ```

    Use instead
    -----------
    ```python
    return (self.weight * x).to(input_dtype)
    ```

    Fix safety
    ----------
    There is no automatic fix: where the weight is bf16 the product is now rounded once instead of twice.

    Known problems
    --------------
    A model whose norm weights always have the model's dtype never meets it. A norm without any cast is not reported: it leaves dtypes to
    its caller, and promises none. Nor is a function whose result every call in the file casts at once.
    """

    code = "LT009"
    name = "norm-follows-weight-dtype"
    first_look = (79, 122)
    on = False
    in_tests = False
    words = ("sqrt", "0.5", "normalize(", "_norm(")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for event in first_of_each((e for e in plain_events(file) if e.scenario == FP32_WEIGHTS), "returned"):
            value = _one_of(event.value)
            function = file.function_of(event.node)
            if not isinstance(value, Tensor) or function is None or not isinstance(event.node, ast.Return) or event.node.value is None:
                continue
            if isinstance(event.node.value, ast.Call) and file.dotted(event.node.value.func).startswith("self."):
                continue  # told where that method returns it
            if _REFERENCE.search(function.name):
                continue  # in the dtype that its test wants
            if any(_SPARES_PRECISION.search(test) for test in event.path):
                continue  # an option of that name, set the other way
            if "buffer" in value.why:
                continue  # a table or a filter bank, and no norm's weight
            if value.zero_dim is not False:
                continue  # a number: a loss
            nodes = _nodes(file, function)
            if value.dtype == "fp32" and value.made is Made.PARAMETER and _is_norm(file, function, nodes):
                if not (_minds_dtypes(nodes) or _made_fp32(value.node)) or _always_cast(file, function):
                    continue
                weight = value.why.removeprefix("the ")
                if not _SCALES.search(weight) and "norm" not in (file.symbol(function) or "").lower():
                    continue  # a distance, a statistic
                yield Hit(
                    node=event.node,
                    message=f"the norm's output has the dtype of its weight: {value.dtype} for {event.scenario.inputs} input",
                    cause=f"the result is multiplied with {weight}, which promotes it when the weight is fp32 and the input bf16; no cast "
                    "to the input's dtype comes after the product",
                    fix="cast the whole product: `(weight * x).to(input_dtype)`",
                    details=details(event),
                    scenario=event.scenario,
                )


def _one_of(value: object) -> object:
    """What is returned, or of several tensors the first that a parameter has made wider: a query and a key."""
    if not isinstance(value, Items) or value.known is None:
        return value
    return next((v for v in value.known if isinstance(v, Tensor) and v.made is Made.PARAMETER and v.dtype == "fp32"), None)


def _nodes(file: SourceFile, function: Function) -> list[ast.AST]:
    """The function's own nodes, and those of methods of the same class that it calls."""
    nodes = list(file.own(function))
    cls = file.parents.get(function)
    if isinstance(cls, ast.ClassDef):
        attributes = [n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        called = {a.attr for a in attributes if last_name(a.value) == "self"}
        for method in cls.body:
            if isinstance(method, ast.FunctionDef) and method.name in called:
                nodes += file.own(method)
    return nodes


def _is_norm(file: SourceFile, function: Function, nodes: list[ast.AST]) -> bool:
    """The root of a mean of squares or of a variance of an input."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg != "self"]
    if not names or any(GRADIENT.search(name) for name in names):
        return False  # a property of weights; an optimizer's update
    tensors = tensor_uses(file, function) | {name for name in names if ACTIVATION.match(name)}
    if not any(name in tensors and not WEIGHT.match(name) for name in names):
        return False  # of weights alone
    called = {last_name(n.func) for n in nodes if isinstance(n, ast.Call) and not file.dotted(n.func).startswith(("math.", "numpy."))}
    if called & {"normalize", "layer_norm", "rms_norm"}:
        return True
    root = bool(called & {"rsqrt", "sqrt"}) or any(is_root(n) for n in nodes)
    return root and bool(called & {"mean", "var", "sum", "square", "pow", "norm"})


def _minds_dtypes(nodes: list[ast.AST]) -> bool:
    """Whether the norm casts at all. One that does not leaves dtypes to its caller, and promises none for its result."""
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("float", "type_as", "type"):
            return True
        given = [*(node.args if node.func.attr == "to" else ()), *(k.value for k in node.keywords if k.arg == "dtype")]
        if any(_names_a_dtype(g) for g in given):
            return True
    return False


def _names_a_dtype(node: ast.expr) -> bool:
    return bool(re.search(r"dtype|type$|float\d|bfloat16", last_name(node)))


def _made_fp32(node: ast.AST | None) -> bool:
    """Whether the weight is created in fp32 independent of the model's dtype."""
    return node is not None and "torch.float32" in ast.unparse(node)


def _always_cast(file: SourceFile, function: Function) -> bool:
    """Whether every call that the file makes of this function casts the result at once."""
    calls = [c for c in file.nodes(ast.Call) if last_name(c.func) == function.name]
    return bool(calls) and all(_is_cast(file.parents.get(call)) for call in calls)


def _is_cast(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("to", "type_as", "half", "bfloat16", "float", "type")
