from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..dataflow.arguments import ACTIVATION
from ..dataflow.events import Event
from ..dataflow.plain import plain_events
from ..dataflow.values import Items, Tensor
from ..repository import Repository
from ..rule import Hit, Rule
from ..source import SourceFile, last_name
from .evidence import details, first_of_each, of_a_model
from .low_dtypes import casts_low

_SPARES_PRECISION = re.compile(r"fp32|float32|upcast|high_precision|full_precision")


_MAKES_ANGLES = re.compile(r"rope|rotary|freq|angle", re.IGNORECASE)
_FOR_A_TABLE = re.compile(r"dtype|freq|theta")
_WRITTEN_LOW = re.compile(r"half\(|float16\b|torch\.half\b")  # bfloat16 as well


class PositionsInLowPrecision(Rule):
    """positions are rounded to bf16 before sin and cos

    Why
    ---
    bf16 holds integers exactly up to 256, fp16 up to 2048. A position cast to the model's dtype is off by up to 8 at 4096, and a rotary
    angle off by radians: the table is noise beyond a few hundred tokens. Nothing raises; long contexts get worse. Autocast does the same
    when the angles come from a matmul or einsum of positions and inverse frequencies.

    Example
    -------
    ```python
    t = torch.arange(seq_len).to(dtype)
    freqs = torch.outer(t, inv_freq.to(dtype))
    return freqs.cos(), freqs.sin()
    ```

    Use instead
    -----------
    ```python
    t = torch.arange(seq_len, dtype=torch.float32)
    freqs = torch.outer(t, inv_freq)
    return freqs.cos().to(dtype), freqs.sin().to(dtype)
    ```
    Under autocast: `with torch.autocast(device_type, enabled=False)` around the product, or an elementwise product instead of an einsum.

    Known problems
    --------------
    Reported where the rounding and the sin or cos are met in one function, or in functions of the same package that it calls. Which
    dtype an argument called `dtype` has is not known: it is taken to be the model's. An einsum counts as CUDA's autocast treats it; the
    CPU's leaves one that sums nothing in fp32. A branch whose test speaks of fp32 is left to its author.
    """

    code = "LT008"
    name = "positions-in-low-precision"
    on = False
    by_name = True
    first_look = (79, 124)
    in_tests = False
    words = ("cos", "sin", "polar", "inv_freq", "rotary", "rope")

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        seen: set[ast.AST | None] = set()
        yield from _leaving(file, seen)
        events = (e for e in plain_events(file) if e.operands and e.operands[0][1].lowered is not None)
        for event in first_of_each(events, "table"):
            label, angle = event.operands[0]
            at = angle.lowered
            if not isinstance(at, (ast.expr, ast.stmt)) or at not in file.parents or file.function_of(at) in seen:
                continue
            if _is_an_angle(file, at, label):
                continue
            seen.add(file.function_of(at))  # rows and columns of a grid are rounded by the same mistake
            if any(_SPARES_PRECISION.search(test) for test in event.path):
                continue  # an option of that name is set to the opposite: the author chose this
            by_autocast = event.scenario.autocast is not None
            if by_autocast and (_built_ahead(file, at) or _called_while_built(file, at) or not _runs_in_forward(file, at)):
                continue
            written = _WRITTEN_LOW.search(ast.unparse(at)) or (isinstance(at, ast.Call) and casts_low(file, at))
            if not by_autocast and not written and not (of_a_model(file, at) or _of_a_table(file, at)):
                continue
            if not by_autocast and not _runs_in_forward(file, at) and not written:
                continue  # built before the model is cast
            how = (
                "autocast computes this product in bf16"
                if by_autocast
                else f"`{file.snippet(at, 50)}` rounds positions or frequencies to {event.scenario.inputs}"
            )
            word = event.scenario.autocast or event.scenario.inputs
            yield Hit(
                node=at,
                message=f"positions in {word} before {event.operation} (line {event.node.lineno})",
                cause=f"{how}; bf16 counts exactly to 256 only, so a position from arange and the angle in {label} are "
                "wrong before cos and sin see them",
                fix="keep positions and inverse frequencies in torch.float32 and cast after cos and sin"
                + (", with autocast switched off around the product" if by_autocast else ""),
                details=details(event),
                scenario=event.scenario,
                elsewhere=None if by_autocast else partial(_kept_in_fp32, file, _cast_with_the_model(file, at)),
            )


def _leaving(file: SourceFile, seen: set[ast.AST | None]) -> Iterator[Hit]:
    """Angles that a function rounds and returns: cos and sin are taken of them elsewhere."""
    for event in first_of_each(filter(_rounds_angles, plain_events(file)), "returned"):
        value, function = _first_lowered(event.value), file.function_of(event.node)
        if value is None:
            continue
        at, name = value.lowered, file.symbol(event.node) or ""
        if not isinstance(at, (ast.expr, ast.stmt)) or at not in file.parents or not _MAKES_ANGLES.search(name):
            continue
        if function is None or function in seen:
            continue
        if any(last_name(n) in ("cos", "sin", "polar") for n in file.own(function) if isinstance(n, ast.Call)):
            continue
        if event.scenario.autocast and (_called_while_built(file, at) or _built_ahead(file, at) or not _runs_in_forward(file, at)):
            continue
        seen.add(function)
        word = event.scenario.autocast or event.scenario.inputs
        yield Hit(
            node=at,
            message=f"angles leave {name} in {word}, before cos and sin are taken of them",
            cause=f"`{file.snippet(at, 50)}` makes positions times frequencies {word}; bf16 counts exactly to 256 only, so that the "
            "angles of later positions are wrong before cos and sin see them",
            fix="return the angles in torch.float32, and cast after cos and sin",
            details=details(event),
            scenario=event.scenario,
        )


def _rounds_angles(event: Event) -> bool:
    """Whether it returns positions times frequencies that were rounded: by a cast that is written, or by autocast."""
    value = _first_lowered(event.value) if event.kind == "returned" and not event.scenario.mixed_weights else None
    return value is not None and (value.frequency or event.scenario.autocast is not None)


def _first_lowered(value: object) -> Tensor | None:
    """The tensor returned, or the first of several, whose positions were rounded on the way."""
    values = value.known or [] if isinstance(value, Items) else [value]
    return next((v for v in values if isinstance(v, Tensor) and v.positional and v.lowered is not None), None)


def _kept_in_fp32(file: SourceFile, names: tuple[str, ...], repository: Repository | None) -> str:
    kept = repository.kept_in_fp32(Path(file.path), names) if repository is not None else ""
    return f"a model beside it keeps {kept} in fp32" if kept else ""


def _cast_with_the_model(file: SourceFile, at: ast.AST) -> tuple[str, ...]:
    """The attributes of `self` that give this its dtype, and their class: none where the dtype comes from elsewhere."""
    attributes = [n.attr for n in ast.walk(at) if isinstance(n, ast.Attribute) and last_name(n.value) == "self"]
    cls = file.parents.get(file.function_of(at) or at)
    return (*attributes, cls.name) if attributes and isinstance(cls, ast.ClassDef) else ()


def _of_a_table(file: SourceFile, at: ast.AST) -> bool:
    """Whether a function is given frequencies or a dtype, as what makes a model's table is; angles of a geometry are not."""
    function = file.function_of(at)
    return function is not None and any(_FOR_A_TABLE.search(a.arg) for a in (*function.args.args, *function.args.kwonlyargs))


def _is_an_angle(file: SourceFile, at: ast.expr | ast.stmt, label: str) -> bool:
    """Whether what is cast goes into sin and cos as it is, times no frequency: a schedule's time, of a few radians."""
    target = file.parents.get(at)
    while isinstance(target, ast.expr):
        target = file.parents.get(target)
    if not isinstance(target, ast.Assign) or label not in [last_name(t) for t in target.targets]:
        return False
    multiplies = (ast.Mult, ast.Div, ast.MatMult)
    return "time" in label and not any(
        (isinstance(n, ast.BinOp) and isinstance(n.op, multiplies)) or last_name(n) in ("outer", "einsum", "mul", "matmul")
        for n in ast.walk(target.value)
    )


def _built_ahead(file: SourceFile, node: ast.AST) -> bool:
    """A method without tensors among its arguments that forward does not call: it fills a table, mostly for a base class' __init__."""
    function = file.function_of(node)
    cls = file.parents.get(function) if function is not None else None
    if function is None or not isinstance(cls, ast.ClassDef) or function.name in ("forward", "__call__"):
        return False
    if any(m.name in ("forward", "__call__") for m in _family(file, cls) if any(_calls(n, function.name) for n in file.own(m))):
        return False
    hints = [ast.unparse(a.annotation) if a.annotation else "" for a in (*function.args.args[1:], *function.args.kwonlyargs)]
    return all("Tensor" not in hint for hint in hints) and not any(ACTIVATION.match(a.arg) for a in function.args.args)


def _called_while_built(file: SourceFile, node: ast.AST) -> bool:
    """A plain function that the file calls in constructors only, or in functions that are called so."""
    function = file.function_of(node)
    seen: set[str] = set()
    waiting = [function] if function is not None and not isinstance(file.parents.get(function), ast.ClassDef) else []
    callers = 0
    for one in waiting:  # grows while it is read
        seen.add(one.name)
        for call in (c for c in file.nodes(ast.Call) if last_name(c.func) == one.name):
            caller = file.function_of(call)
            callers += 1
            if caller is None or caller.name == "__init__":
                continue
            if isinstance(file.parents.get(caller), ast.ClassDef):
                return False
            if caller.name not in seen:
                waiting.append(caller)
    return callers > 0


def _family(file: SourceFile, cls: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The methods of the class, of its bases and of what derives from it, as far as this file has them."""
    classes = {c.name: c for c in file.nodes(ast.ClassDef)}
    names = {cls.name} | {last_name(b) for b in cls.bases} | {c.name for c in classes.values() if cls.name in map(last_name, c.bases)}
    for name in names & classes.keys():
        yield from (m for m in classes[name].body if isinstance(m, ast.FunctionDef))


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == name


def _runs_in_forward(file: SourceFile, node: ast.AST) -> bool:
    """False for a method that its class calls while it is built and not from forward: the model is in fp32 then, without autocast."""
    function = file.function_of(node)
    cls = file.parents.get(function) if function is not None else None
    if function is None or not isinstance(cls, ast.ClassDef):
        return True
    calls = {
        m.name: {last_name(n.func) for n in file.own(m) if isinstance(n, ast.Call)} for m in cls.body if isinstance(m, ast.FunctionDef)
    }

    def reached(start: str) -> set[str]:
        seen = {start}
        waiting = [start]
        while waiting:
            for name in calls.get(waiting.pop(), set()) & calls.keys():
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return seen

    return function.name not in reached("__init__") or function.name in reached("forward")
