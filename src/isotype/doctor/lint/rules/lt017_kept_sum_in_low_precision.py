from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from ..dataflow.plain import PURE
from ..dataflow.torch_names import LIKE
from ..rule import Hit, Rule
from ..source import Function, SourceFile, keyword, last_name
from .low_dtypes import LOW

WIDE = frozenset({"torch.float32", "torch.float", "torch.float64", "torch.double"})
OF_PARAMETERS = frozenset({"parameters", "named_parameters", "state_dict", "named_buffers", "param_groups"})

Owner = Callable[[ast.expr], str | None]  # the kept attribute that an expression stands for


class KeptSumInLowPrecision(Rule):
    """a sum that a class keeps between calls (gradients, a moving average) has the dtype of the parameters

    Why
    ---
    What is added a little at a time needs more bits than what is added. bf16 keeps 8: an average with decay 0.999 moved 6% of the way that
    it should in 1,000 steps, since a thousandth of a weight's change is below half a unit in the last place; gradients of 256 micro-batches
    summed in bf16 are off by 1.5%, in fp32 by 0.02%.

    Example
    -------
    ```python
    class Average:
        def __init__(self, model):
            self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}     # bf16 for a bf16 model

        def update(self, model):
            for n, p in model.named_parameters():
                self.shadow[n].mul_(0.999).add_(p, alpha=0.001)
    ```

    Use instead
    -----------
    ```python
            self.shadow = {n: p.detach().clone().float() for n, p in model.named_parameters()}
    ```

    Fix safety
    ----------
    There is no automatic fix: the places that read the sum may have to cast it.

    Known problems
    --------------
    A class whose parameters are always in fp32 loses nothing, nor does a copy of such a model.
    Only tensors kept in an attribute of `self`, and changed by a method of the
    same class, are looked at; an optimizer's `state[p]` follows its parameter by torch's own convention, and is left alone.
    """

    code = "LT017"
    name = "kept-sum-in-low-precision"
    on = False
    by_name = True
    first_look = (0, 1)
    words = ("grad", "decay", "lerp", "ema", "beta", "momentum", "mean", "average", "avg")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for cls in file.nodes(ast.ClassDef):
            methods = [m for m in cls.body if isinstance(m, Function)]
            makers = [m for m in methods if not m.name.startswith(("load", "restore", "set_state", "__setstate__"))]  # they put back
            kept = {name: made for method in makers for name, made in _kept(file, method)}
            for name in kept.keys() & _widened(file, cls):
                del kept[name]
            seen: set[str] = set()
            for method in methods if kept else ():
                for name, node, what in _sums(file, method, set(kept)):
                    made = kept[name].node
                    if name not in seen and (file.function_of(made) is not method or _on_first_use(file, made, name)):
                        seen.add(name)
                        yield _hit(file, name, kept[name], node, what)


@dataclass(frozen=True, slots=True)
class _Made:
    """Where a kept tensor is made; literal: in a low precision written there, else in that of a parameter."""

    node: ast.expr
    literal: bool


def _hit(file: SourceFile, name: str, made: _Made, node: ast.stmt | ast.expr, what: str) -> Hit:
    dtype = "a low precision" if made.literal else "the parameters' dtype"
    return Hit(
        node=made.node,
        message=f"`self.{name}` keeps {what} in {dtype} (summed in line {node.lineno})",
        cause=f"`{file.snippet(made.node, 50)}` gives the buffer {dtype}: in bf16 (bfloat16) each `{file.snippet(node, 50)}` rounds to 8 "
        "bits, and what is added in small parts is lost; float32 keeps it",
        fix="keep it in float32: `dtype=torch.float32`, or `.float()` on the copy, and cast where it is read",
        scenario=PURE,
    )


def _kept(file: SourceFile, method: Function) -> Iterator[tuple[str, _Made]]:
    """Attributes of self that hold tensors made from parameters, or lists and dicts of them, in a dtype that may be low."""
    over = _names_of_parameters(file, method)
    for node in file.own(method):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                owner = target.value if isinstance(target, ast.Subscript) else target
                if _is_self(owner):
                    yield from ((owner.attr, made) for made in _makers(file, node.value, over))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
            appended_to = node.func.value
            if _is_self(appended_to):
                yield from ((appended_to.attr, made) for made in _makers(file, node.args[0], over))


def _on_first_use(file: SourceFile, made: ast.expr, name: str) -> bool:
    """`if self.NAME is None:` around the place where it is made."""
    parent = file.parents.get(made)
    while parent is not None and not isinstance(parent, (ast.If, Function)):
        parent = file.parents.get(parent)
    return isinstance(parent, ast.If) and any(_is_self(n) and n.attr == name for n in ast.walk(parent.test) if isinstance(n, ast.Attribute))


def _widened(file: SourceFile, cls: ast.ClassDef) -> set[str]:
    """Attributes of self that some statement of the class casts to fp32: `self.average.float()`."""
    calls = [
        (n, n.func.value) for n in ast.walk(cls) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and _is_self(n.func.value)
    ]
    return {
        owner.attr
        for call, owner in calls
        if last_name(call.func) in ("float", "double") or any(file.dotted(a) in WIDE for a in (*call.args, keyword(call, "dtype")) if a)
    }


def _makers(file: SourceFile, value: ast.expr, over: set[str]) -> Iterator[_Made]:
    if isinstance(value, (ast.DictComp, ast.ListComp)):
        over = over | {n for g in value.generators if _reads_parameters(g.iter, over) for n in _targets(g.target)}
        value = value.value if isinstance(value, ast.DictComp) else value.elt
    low = _low(file, value, over)
    if low is not None:
        yield _Made(value, low)


def _low(file: SourceFile, value: ast.expr, over: set[str]) -> bool | None:
    """True: low as written; False: as the parameter; None: neither is certain."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    name, dtype = last_name(value.func), keyword(value, "dtype")
    if file.dotted(value.func) == "copy.deepcopy":
        return False  # a whole model, in its parameters' dtype
    given = [a for a in (*value.args, dtype) if a is not None]
    if any(file.dotted(a) in LOW for a in given) or (name in ("half", "bfloat16") and not value.args):
        return True if _roots(value) & over or name.startswith(("zeros", "empty", "full")) else None
    if any(file.dotted(a) in WIDE for a in given) or name in ("float", "double"):
        return None
    if name in LIKE and value.args and dtype is None:
        return False if _roots(value.args[0]) & over else None
    if name == "clone":  # p.detach().clone(), torch.clone(p)
        inner = value.func.value
        while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if last_name(inner.func) not in ("detach", "cpu", "contiguous", "to", "clone"):
                return None
            if any(file.dotted(a) in WIDE for a in (*inner.args, *(k.value for k in inner.keywords))):
                return None
            inner = inner.func.value
        return False if (_roots(value) & over) else None
    if name in ("detach", "to", "cpu", "cuda", "requires_grad_", "pin_memory", "contiguous", "eval", "train") and not any(
        "dtype" in ast.unparse(g) for g in given
    ):
        return _low(file, value.func.value, over)
    return None


def _names_of_parameters(file: SourceFile, method: Function) -> set[str]:
    """Names that run over parameters in this method: `for n, p in model.named_parameters()`."""
    found: set[str] = set()
    for node in file.own(method):
        if isinstance(node, ast.For) and _reads_parameters(node.iter, found):
            found |= set(_targets(node.target))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_of_parameters(node.value):
            found.add(node.targets[0].id)
    return found


def _is_of_parameters(value: ast.expr) -> bool:
    """`model.state_dict()`, and a dict or list of what it holds that casts nothing."""
    if isinstance(value, (ast.DictComp, ast.ListComp)):
        element = value.value if isinstance(value, ast.DictComp) else value.elt
        kept = {"detach", "cpu", "cuda", "clone", "contiguous"}
        while isinstance(element, ast.Call) and isinstance(element.func, ast.Attribute) and element.func.attr in kept:
            element = element.func.value
        return isinstance(element, ast.Name) and _reads_parameters(value.generators[0].iter, set())
    return isinstance(value, ast.Call) and last_name(value) in OF_PARAMETERS


def _reads_parameters(source: ast.expr, over: set[str]) -> bool:
    return any(
        (isinstance(n, ast.Name) and n.id in over)
        or last_name(n) in OF_PARAMETERS
        or (isinstance(n, (ast.Name, ast.Attribute)) and last_name(n).endswith(("params", "parameters")))
        for n in ast.walk(source)
        if isinstance(n, (ast.Call, ast.Name, ast.Attribute, ast.Subscript))
    )


def _sums(file: SourceFile, method: Function, kept: set[str]) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    """Statements that add to what is kept: attribute, statement, what it is."""
    alias = _aliases(file, method, kept)

    def owner(node: ast.expr) -> str | None:
        while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        if isinstance(node, ast.Attribute) and _is_self(node) and node.attr in kept:
            return node.attr
        return alias.get(node.id) if isinstance(node, ast.Name) else None

    for node in file.own(method):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            name = owner(node.target)
            if name and _of_gradients(node.value):
                yield name, node, "a sum of gradients"
            elif name and any(
                isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and owner(n.right) == name for n in ast.walk(node.value)
            ):
                yield name, node, "a moving average"  # mean += (new - mean) / n
        elif isinstance(node, ast.Assign) and (name := owner(node.targets[0])):
            if _averages(node.value, owner):
                yield name, node, "a moving average"
            elif isinstance(node.value, ast.BinOp) and owner(node.value.left) == name and _of_gradients(node.value.right):
                yield name, node, "a sum of gradients"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _calls(node, owner)


def _calls(node: ast.Call, owner: Owner) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    assert isinstance(node.func, ast.Attribute)
    verb, receiver = node.func.attr, node.func.value
    if verb == "add_" and (name := owner(receiver)) and any(map(_of_gradients, node.args)):
        yield name, node, "a sum of gradients"
    scaled = receiver.func if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute) else None
    if verb in ("add_", "sub_") and scaled is not None and scaled.attr == "mul_" and (name := owner(scaled.value)):
        yield name, node, "a moving average"
    if verb in ("lerp_", "sub_") and (name := owner(receiver)) and (verb == "lerp_" or _mentions_decay(node)):
        yield name, node, "a moving average"
    if verb == "copy_" and (name := owner(receiver)) and node.args and _averages(node.args[0], owner):
        yield name, node, "a moving average"
    if verb in ("_foreach_lerp_", "_foreach_mul_") and node.args and (name := owner(node.args[0])):
        yield name, node, "a moving average"


def _aliases(file: SourceFile, method: Function, kept: set[str]) -> dict[str, str]:
    """Local names for what an attribute holds: `buf = self.sums[n]`, `for p, g in zip(params, self.sums)`."""
    found: dict[str, str] = {}

    def attribute(node: ast.expr) -> str | None:
        names = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_self(n) and n.attr in kept]
        return names[0] if len(names) == 1 else None

    for node in file.own(method):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, (ast.Subscript, ast.Attribute))
        ):
            if name := attribute(node.value):
                found[node.targets[0].id] = name
        elif isinstance(node, ast.For):
            source, targets = node.iter, node.target
            if isinstance(source, ast.Call) and last_name(source) == "zip" and isinstance(targets, ast.Tuple):
                for one, target in zip(source.args, targets.elts):
                    name = attribute(one)
                    if name and (inner := list(_targets(target))):
                        found[inner[-1]] = name
            elif (name := attribute(source)) and (inner := list(_targets(targets))):
                found[inner[-1]] = name
    bound: dict[str, set[str]] = {}
    for node in file.own(method):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, set()).add(ast.dump(node.value))
    return {name: attribute for name, attribute in found.items() if len(bound.get(name, ())) < 2}  # one name for two things tells nothing


def _averages(value: ast.expr, owner: Owner) -> bool:
    """`decay * kept + (1 - decay) * new`, in either order."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, (ast.Add, ast.Sub)):
        return False
    products = [s for s in (value.left, value.right) if isinstance(s, ast.BinOp) and isinstance(s.op, ast.Mult)]
    return any(owner(side) is not None for product in products for side in (product.left, product.right)) and len(products) == 2


def _of_gradients(value: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("grad", "main_grad") for n in ast.walk(value))


def _mentions_decay(node: ast.expr) -> bool:
    return any("decay" in last_name(n) or last_name(n) in ("beta", "momentum", "alpha") for n in ast.walk(node))


def _targets(target: ast.expr) -> Iterator[str]:
    return (n.id for n in ast.walk(target) if isinstance(n, ast.Name))


def _roots(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_self(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
