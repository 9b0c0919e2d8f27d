"""Which expressions stand for bf16 or fp16, and which calls cast to them or up from them: shared by the rules about casts."""

from __future__ import annotations

import ast
import re

from ..dataflow.arguments import defaults_of
from ..source import Function, SourceFile, bindings, keyword, last_name

LOW = frozenset({"torch.bfloat16", "torch.float16", "torch.half"})
# the dtype that the model computes in, wherever it was chosen
_OF_THE_MODEL = re.compile(r"^(weight|model|compute|torch|inference|mixed_precision|autocast|amp|half)_dtype$")
_MODEL = re.compile(r"(^|_)(model|unet|transformer|vae|encoder|encoder_\d|decoder|backbone|net|policy|pipe|pipeline)$")


def casts_low(file: SourceFile, call: ast.Call) -> bool:
    """Whether a method call casts to low precision: `.half()`, `.to(torch.bfloat16)`, `.to(device, dtype=weight_dtype)`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in ("half", "bfloat16") and not call.args:
        return True
    if call.func.attr not in ("to", "type"):
        return False
    given = [a for a in (*call.args, keyword(call, "dtype")) if a is not None]
    return any(is_low(file, a) for a in given)


def is_upcast(file: SourceFile, call: ast.Call) -> bool:
    """`x.float()`, and any call that is given torch.float32 or torch.float64."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("float", "double") and not call.args:
        return True
    given = [*call.args, *(k.value for k in call.keywords)]
    return any(file.dotted(g) in ("torch.float32", "torch.float", "torch.float64", "torch.double") for g in given)


def is_low(file: SourceFile, node: ast.expr) -> bool:
    """A dtype written out, the name of one, the model's dtype, or one of two of which at least one is low."""
    if isinstance(node, ast.IfExp):
        asks = any(last_name(n) in ("is_floating_point", "dtype") for n in ast.walk(node.test))
        return not asks and (is_low(file, node.body) or is_low(file, node.orelse))
    if file.dotted(node) in LOW:
        return True
    if isinstance(node, ast.Name):
        function = file.function_of(node)
        return bool(_OF_THE_MODEL.match(node.id) and not _may_be_wide(file, function, node.id)) or node.id in _low_names(file, function)
    if isinstance(node, ast.Attribute):
        if _OF_THE_MODEL.match(node.attr) or (node.attr == "dtype" and _MODEL.search(last_name(node.value))):
            return True
        return isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in _low_attributes(file, node)
    return False


def _may_be_wide(file: SourceFile, function: Function | None, name: str) -> bool:
    """Whether the function binds the name to fp32, at least where the input is low."""
    bound = (pair for node in file.own(function or file.tree) for pair in bindings(node))
    return any(
        isinstance(target, ast.Name)
        and target.id == name
        and any(file.dotted(n) == "torch.float32" for n in ast.walk(value) if isinstance(n, ast.expr))
        for target, value in bound
    )


def _low_names(file: SourceFile, function: Function | None) -> set[str]:
    """Names that stand for a low precision: assigned in this function or the module, or an argument's default."""
    known = file.memo.setdefault("low_names", {})
    if function not in known:
        defaults = defaults_of(function) if function is not None else {}
        found = {name for name, default in defaults.items() if file.dotted(default) in LOW}
        for scope in (file.tree, function):
            for node in file.own(scope) if scope is not None else ():
                for target, value in bindings(node):
                    arms = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
                    if isinstance(target, ast.Name) and any(file.dotted(v) in LOW for v in arms):
                        found.add(target.id)
        known[function] = found
    names: set[str] = known[function]
    return names


def _low_attributes(file: SourceFile, node: ast.AST) -> set[str]:
    """What `self` has of that kind: set in the class, or by one of its methods from a name that is low there."""
    cls = file.parents.get(node)
    while cls is not None and not isinstance(cls, ast.ClassDef):
        cls = file.parents.get(cls)
    known = file.memo.setdefault("low_attributes", {})
    if cls is not None and cls not in known:
        found: set[str] = set()
        for scope in (cls, *(m for m in cls.body if isinstance(m, Function))):
            names = _low_names(file, scope) if isinstance(scope, Function) else set()
            for statement in file.own(scope):
                for target, value in bindings(statement):
                    if file.dotted(value) in LOW or (isinstance(value, ast.Name) and value.id in names):
                        found.add(last_name(target))
        known[cls] = found
    low: set[str] = known.get(cls, set())
    return low
