"""autograd.Functions: forward and backward run as a pair, the gradient arriving in the dtype that forward returned.

A scenario whose forward torch would refuse has no backward. Decorators count as torch applies them: custom_fwd without cast_inputs
leaves autocast on, custom_bwd restores forward's autocast in backward, and both do so for their own device only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..source import SourceFile, keyword, last_name
from . import arguments
from .endings import Impossible, OutOfSteps
from .events import Event, Launches, Scenario
from .interpreter import Interpreter, run_function
from .paths import Path, each_path
from .values import UNFOLLOWED, Closure, Context, Dtype, Env, Items, Made, Scalar, Tensor

SCENARIOS = (
    Scenario(inputs="fp32", weights="fp32", autocast="bf16"),
    Scenario(inputs="bf16", weights="fp32", autocast="bf16"),
    Scenario(inputs="bf16", weights="bf16"),
    Scenario(inputs="bf16", weights="bf16", autocast="bf16"),
)
OTHER_DEVICE = Scenario(inputs="fp32", weights="fp32", autocast="bf16", device="cpu")


@dataclass(frozen=True, slots=True)
class Decorator:
    """custom_fwd or custom_bwd on a method. device: the literal it names, or None when that is not written out."""

    node: ast.expr
    device: str | None
    cast_inputs: ast.expr | None = None

    def applies(self, device: str) -> bool:
        return self.device is None or self.device == device


@dataclass(slots=True, eq=False)
class FunctionClass:
    """A class derived from torch.autograd.Function."""

    cls: ast.ClassDef
    forward: ast.FunctionDef | None = None
    backward: ast.FunctionDef | None = None
    setup_context: ast.FunctionDef | None = None
    custom_fwd: Decorator | None = None
    custom_bwd: Decorator | None = None
    events: list[Event] = field(default_factory=list)
    launched: Launches = field(default_factory=dict)  # in a bf16 model
    launched_under: dict[Scenario, Launches] = field(default_factory=dict)  # in every scenario
    hard_coded: list[Event] = field(default_factory=list)  # on a device for which the decorators were not written


def function_classes(file: SourceFile) -> list[FunctionClass]:
    """Every autograd.Function of the file, with what was seen in it."""
    if "function_classes" not in file.memo:
        found = [_read(file, cls) for cls in file.nodes(ast.ClassDef) if _is_function(file, cls)]
        found = [function for function in found if function.forward or function.backward]
        for function in found:
            _follow(file, function)
        file.memo["function_classes"] = found
    return file.memo["function_classes"]


def _is_function(file: SourceFile, cls: ast.ClassDef) -> bool:
    """Whether it derives from torch.autograd.Function, or from a class of this file that does."""
    bases = [base for c in family(file, cls) for base in c.bases]
    return any(dotted.endswith("autograd.Function") or dotted == "torch.autograd.function.Function" for dotted in map(file.dotted, bases))


def family(file: SourceFile, cls: ast.ClassDef) -> list[ast.ClassDef]:
    """The class and those of this file from which it inherits, nearest first."""
    if "classes" not in file.memo:
        file.memo["classes"] = {c.name: c for c in file.nodes(ast.ClassDef)}
    found = [cls]
    for one in found:  # grows while it is read
        found += [c for base in one.bases if (c := file.memo["classes"].get(last_name(base))) is not None and c not in found]
    return found


def _read(file: SourceFile, cls: ast.ClassDef) -> FunctionClass:
    function = FunctionClass(cls)
    own = {item.name for item in cls.body if isinstance(item, ast.FunctionDef)}
    if not own & {"forward", "backward", "setup_context"}:
        return function  # told where its base is
    for one in reversed(family(file, cls)):
        for item in one.body:
            if isinstance(item, ast.FunctionDef) and item.name in ("forward", "backward", "setup_context"):
                setattr(function, item.name, item)
    function.custom_fwd = _decorator(file, function.forward, "custom_fwd")
    function.custom_bwd = _decorator(file, function.backward, "custom_bwd")
    return function


def _decorator(file: SourceFile, method: ast.FunctionDef | None, name: str) -> Decorator | None:
    """The decorator so named, or a package's own wrapping of it (`amp_custom_fwd`, `autocast_custom_fwd`)."""
    for written in method.decorator_list if method else ():
        node = _bound_at_module_level(file, written)
        dotted = file.dotted(node.func if isinstance(node, ast.Call) else node)
        if dotted in ("functools.partial", "partial") and isinstance(node, ast.Call) and node.args:
            dotted = file.dotted(node.args[0])
        if name not in dotted.rpartition(".")[2] and name not in last_name(written):
            continue
        if dotted.startswith("torch.cuda"):
            return Decorator(written, "cuda", keyword(node, "cast_inputs") if isinstance(node, ast.Call) else None)
        device: str | None = None
        if isinstance(node, ast.Call):
            value = keyword(node, "device_type") or (node.args[0] if node.args and dotted.startswith("torch.amp") else None)
            device = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
            return Decorator(written, device, keyword(node, "cast_inputs"))
        return Decorator(written, None)
    return None


def _bound_at_module_level(file: SourceFile, decorator: ast.expr) -> ast.expr:
    """What `name = ...` of the module says that `@name` or `@name()` is; the decorator itself when nothing does."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(called, ast.Name):
        for node in file.own(file.tree):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == called.id for t in node.targets):
                return node.value
    return decorator


def _follow(file: SourceFile, function: FunctionClass) -> None:
    if function.forward is None:
        return
    shielded = _always_outside_autocast(file, function.cls.name)
    decorators = [d for d in (function.custom_fwd, function.custom_bwd) if d]
    own_device = next((d.device for d in decorators if d.device), "cuda")
    for scenario in SCENARIOS:
        if not (shielded and scenario.autocast):
            each_path(partial(_run_pair, file, function, replace(scenario, device=own_device), function.events))
    if not shielded and decorators and all(d.device == "cuda" for d in decorators):
        each_path(partial(_run_pair, file, function, OTHER_DEVICE, function.hard_coded))


def _run_pair(file: SourceFile, function: FunctionClass, scenario: Scenario, events: list[Event], path: Path) -> None:
    """forward, then backward outside autocast as trainers call it, along one path."""
    assert function.forward is not None
    run = Interpreter(file, scenario, path)
    ctx = Context()
    try:
        output = _run_forward(run, file, function, ctx)
        refused = [e for e in run.events if e.kind in ("matmul", "out", "in_place", "scatter", "attention")]
        if not refused and function.backward is not None:
            _run_backward(run, file, function, ctx, output)
    except Impossible:
        return
    except OutOfSteps:
        pass
    events += run.events
    for site, given in run.launched.items() if events is function.events else ():
        function.launched_under.setdefault(scenario, {}).setdefault(site, []).extend(given)
        if scenario.autocast is None:
            function.launched.setdefault(site, []).extend(given)


def _run_forward(run: Interpreter, file: SourceFile, function: FunctionClass, ctx: Context) -> Any:
    forward = function.forward
    assert forward is not None
    run.phase = "forward"
    own = [*forward.args.posonlyargs, *forward.args.args]
    has_ctx = function.setup_context is None
    first = own[0].arg if has_ctx and own else None
    values = arguments.bind(file, forward, [*(own[1:] if has_ctx else own), *forward.args.kwonlyargs], run.scenario, run.path, module=False)
    decorator = function.custom_fwd
    if decorator and decorator.cast_inputs is not None and run.autocast and decorator.applies(run.scenario.device):
        wanted = run.evaluate(decorator.cast_inputs, Env())
        word = wanted.word if isinstance(wanted, Dtype) else None
        values = {
            k: v.but(dtype=word, why=f"{k}, cast by custom_fwd") if isinstance(v, Tensor) and v.floating else v for k, v in values.items()
        }
        run.autocast = None
    env = Env(arguments.enclosing(file, forward, run.scenario, run.path))
    env.names |= values | arguments.extra(forward, run.scenario)
    if first:
        env.names[first] = ctx
    output = run_function(run, Closure(forward, file, Env()), env)
    if function.setup_context is not None:
        setup = function.setup_context
        names = [a.arg for a in setup.args.args]
        inner = Env()
        inner.names |= dict(zip(names, [ctx, Items(known=list(values.values())), output]))
        run_function(run, Closure(setup, file, Env()), inner)
    return output


def _run_backward(run: Interpreter, file: SourceFile, function: FunctionClass, ctx: Context, output: Any) -> None:
    backward = function.backward
    assert backward is not None
    run.phase = "backward"
    decorators = (function.custom_fwd, function.custom_bwd)
    restored = all(d is not None and d.applies(run.scenario.device) for d in decorators)
    casts = function.custom_fwd is not None and function.custom_fwd.cast_inputs is not None
    run.autocast = run.scenario.autocast if restored and not casts else None
    names = [a.arg for a in (*backward.args.posonlyargs, *backward.args.args)]
    env = Env(arguments.enclosing(file, backward, run.scenario, run.path))
    env.names |= arguments.extra(backward)
    if names:
        env.names[names[0]] = ctx
    outputs = output.known if isinstance(output, Items) and output.known is not None else [output]
    gradients = [_gradient(value, position) for position, value in enumerate(outputs)]
    for position, name in enumerate(names[1:]):
        env.names[name] = gradients[position] if position < len(gradients) else UNFOLLOWED
    if backward.args.vararg:
        env.names[backward.args.vararg.arg] = Items(known=gradients[max(len(names) - 1, 0) :])
    run_function(run, Closure(backward, file, Env()), env)


def _gradient(output: Any, position: int) -> Any:
    if not isinstance(output, Tensor):
        return Scalar() if isinstance(output, Scalar) else UNFOLLOWED
    origin = f": {output.why}" if output.why else ""
    return Tensor(output.dtype, Made.GRADIENT, f"the gradient, in the dtype that forward returned{origin}", output.node, output.zero_dim)


def _always_outside_autocast(file: SourceFile, name: str) -> bool:
    """Whether every `Name.apply` of the file stands inside `with autocast(enabled=False)`."""
    sites = [n for n in file.nodes(ast.Attribute) if n.attr == "apply" and isinstance(n.value, ast.Name) and n.value.id == name]
    return bool(sites) and all(any(_switches_off(w) for w in _withs(file, site)) for site in sites)


def _withs(file: SourceFile, node: ast.AST) -> Iterator[ast.With]:
    current = file.parents.get(node)
    while current is not None:
        if isinstance(current, ast.With):
            yield current
        current = file.parents.get(current)


def _switches_off(node: ast.With) -> bool:
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and "autocast" in last_name(call.func):
            values = [keyword(call, "enabled"), *call.args[:1]]
            if "off" in last_name(call.func) or any(isinstance(v, ast.Constant) and v.value is False for v in values):
                return True
    return False
