"""Plain functions and methods: run when they, or what they call in the same file, do something that a rule asks about."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import partial

from ..source import Function, SourceFile, keyword, last_name
from . import arguments
from . import torch_names as names
from .endings import Impossible, OutOfSteps
from .events import Event, Launches, Scenario
from .functions import function_classes
from .interpreter import Interpreter, run_function
from .modules import class_attributes
from .paths import Path, each_path
from .values import Closure, Env, Instance

PURE = Scenario(inputs="bf16", weights="bf16")
AUTOCAST = Scenario(inputs="fp32", weights="fp32", autocast="bf16")
FP32_WEIGHTS = Scenario(inputs="bf16", weights="fp32")  # fp32 norms in a bf16 model: only what a function returns counts
SCENARIOS = (PURE, AUTOCAST, FP32_WEIGHTS)

_FLOAT_FACTORIES = names.FACTORIES - {"arange", "as_tensor", "tensor"}
_NORM = frozenset({"rsqrt", "rsqrt_", "sqrt", "normalize", "layer_norm", "rms_norm"})
_TABLE = frozenset({"cos", "sin", "polar"})
_MAKES_ANGLES = re.compile(r"rope|rotary|freq|angle", re.IGNORECASE)
_KERNEL_LANGUAGES = frozenset({"tl", "hl", "T", "ct"})
MAX_PATHS = 8
MAX_STEPS = 12_000  # in all runs of one function in one scenario

Wanted = dict[Function, set[Scenario]]


def plain_events(file: SourceFile) -> list[Event]:
    """What was seen in the functions of the file that are not methods of an autograd.Function."""
    if "plain" not in file.memo:
        runs: list[_Runs] = []
        for function, scenarios in _worth_running(file).items():
            runs += [_explored(file, function, scenario) for scenario in SCENARIOS if scenario in scenarios]
        file.memo["plain"] = [event for one in runs for event in one.events if not _disproved(event, one, runs, file)]
    events: list[Event] = file.memo["plain"]
    return events


@dataclass(slots=True)
class _Runs:
    """The runs of one function in one scenario: what was seen, and which functions it called with known dtypes."""

    function: Function
    scenario: Scenario
    events: list[Event] = field(default_factory=list)
    entered: dict[ast.AST, set[frozenset[str | None]]] = field(default_factory=dict)
    steps: int = MAX_STEPS
    launched: Launches = field(default_factory=dict)
    defaults: bool = True  # options are left as they are; else a test of one goes both ways
    impossible: bool = False  # some way through it ends at a kernel that torch has not


def _disproved(event: Event, one: _Runs, runs: list[_Runs], file: SourceFile) -> bool:
    """Whether the callers in this file pass other dtypes than were assumed, for which the event does not occur."""
    if event.kind == "returned":  # recorded for the outermost function only: what matters is whether it combined two dtypes at all
        given = [dtypes for r in runs if r.scenario == one.scenario for dtypes in r.entered.get(one.function, ()) if dtypes]
        return bool(given) and all(len(dtypes) == 1 for dtypes in given)
    others = [r for r in runs if r.scenario == one.scenario and r.function is not one.function and r.function.name != "__init__"]
    callers = [r for r in others if one.function in r.entered] or _with_options_either_way(file, one.function, others)
    outermost = [r for r in callers if not any(r.function in above.entered for above in callers if above is not r)]
    callers = outermost or callers  # none where they call one another
    return bool(callers) and not any(_alike(e, event) for r in callers for e in r.events)


def _with_options_either_way(file: SourceFile, function: Function, others: list[_Runs]) -> list[_Runs]:
    """The runs that come to a function of this name once its callers' options are not left as they are."""
    found: list[_Runs] = []
    for r in others:
        if any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == function.name for n in file.own(r.function)):
            again = _explored(file, r.function, r.scenario, defaults=False)
            found += [again] if function in again.entered else []
    return found


def _alike(one: Event, other: Event) -> bool:
    """The same thing at the same place; of two tables, both of rounded positions or neither."""
    rounded = [any(value.lowered is not None for _, value in event.operands) for event in (one, other)]
    return one.node is other.node and one.kind == other.kind and (one.kind != "table" or rounded[0] == rounded[1])


def launched_by(file: SourceFile, function: Function, scenario: Scenario) -> Launches:
    """What the launches `kernel[grid](...)` of a function hand to kernels, along each way through it."""
    return _explored(file, function, scenario).launched


def _explored(file: SourceFile, function: Function, scenario: Scenario, *, defaults: bool = True) -> _Runs:
    """The runs of a function along each way through it, made once."""
    known = file.memo.setdefault("explored", {})
    key = (function, scenario, defaults)
    if key not in known:
        known[key] = _Runs(function, scenario, defaults=defaults)
        each_path(partial(_run, file, known[key]), MAX_PATHS)
    runs: _Runs = known[key]
    return runs


def entered_with(file: SourceFile, function: Function, called: Function, scenario: Scenario) -> set[frozenset[str | None]]:
    """The floating dtypes that a function of this file hands to one of another file; nothing where they are not known."""
    entered = _explored(file, function, scenario).entered
    same = [node for node in entered if isinstance(node, Function) and (node.name, node.lineno) == (called.name, called.lineno)]
    return {dtypes for node in same for dtypes in entered[node]}


def refused_in_bf16(file: SourceFile) -> str:
    """The class of the file whose forward, on its plainest way, asks torch for a kernel that bf16 has not; or ""."""
    if "refused_in_bf16" not in file.memo:
        found = ""
        for function in file.functions():
            cls = file.parents.get(function)
            if function.name == "forward" and isinstance(cls, ast.ClassDef) and any(map(_is_spectrum, file.own(function))):
                one = _Runs(function, PURE)
                _run(file, one, Path())
                found = found or (cls.name if one.impossible else "")
        file.memo["refused_in_bf16"] = found
    refusing: str = file.memo["refused_in_bf16"]
    return refusing


def _is_spectrum(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in names.SPECTRA


def _worth_running(file: SourceFile) -> Wanted:
    """Functions with a trigger and the scenarios it asks for; and the functions of the file that call one of them."""
    inside = {f.cls for f in function_classes(file)}
    calls: dict[Function, set[str]] = {}
    wanted: Wanted = {}
    for function in file.functions():
        if file.parents.get(function) in inside or _is_kernel(file, function):
            continue
        called: set[str] = set()  # plain functions and methods of self
        scenarios: set[Scenario] = set()
        loops = False
        for node in file.own(function):
            if isinstance(node, ast.Call):
                scenarios |= _asked_for(file, node)
                loops = loops or last_name(node.func) in names.LIKE or last_name(node.func) in ("zeros", "new_zeros")
                if isinstance(node.func, ast.Name) or (isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "self"):
                    called.add(last_name(node.func))
        if loops and any(_writes_at_index(node) for node in file.own(function)):
            scenarios |= {PURE, AUTOCAST}
        if any(is_root(node) for node in file.own(function)):
            scenarios |= {PURE, FP32_WEIGHTS}
        if _multiplies_after_widening(file, function):
            scenarios.add(PURE)
        if "arange" in file.text and _MAKES_ANGLES.search(file.symbol(function) or ""):
            scenarios |= {PURE, AUTOCAST}
        loops = loops or any(isinstance(n, ast.Assign) and "grad" in last_name(n.targets[0]) for n in file.own(function))
        if loops and any(isinstance(node, (ast.For, ast.While)) for node in file.own(function)):
            scenarios.add(PURE)
        calls[function] = called
        if scenarios:
            wanted[function] = scenarios
    callers: dict[str, list[Function]] = {}
    for function, called in calls.items():
        for name in called:
            callers.setdefault(name, []).append(function)
    waiting = list(wanted)
    for function in waiting:  # grows while it is read: the casts of whatever calls it may decide
        for caller in callers.get(function.name, ()):
            missing = wanted[function] - wanted.get(caller, set())
            if missing:
                wanted.setdefault(caller, set()).update(missing)
                waiting.append(caller)
    return wanted


def _writes_at_index(node: ast.AST) -> bool:
    """`out[rows] = value`: index_put_, where `rows` is a tensor."""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    if not isinstance(target, ast.Subscript):
        return False
    indices = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    return any(isinstance(index, ast.Name) for index in indices)


def is_root(node: ast.AST) -> bool:
    """`x ** -0.5` and `x ** 0.5`, of something computed."""
    if (
        not isinstance(node, ast.BinOp)
        or not isinstance(node.op, ast.Pow)
        or isinstance(node.left, (ast.Constant, ast.Name, ast.Attribute))
    ):
        return False
    power = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
    return isinstance(power, ast.Constant) and power.value == 0.5


def _multiplies_after_widening(file: SourceFile, function: Function) -> bool:
    """A method, or a function of activations, that casts to fp32 or makes a table of positions, and multiplies or calls submodules."""
    given = (*function.args.args, *function.args.kwonlyargs)
    if not isinstance(file.parents.get(function), ast.ClassDef) and not any(arguments.ACTIVATION.match(a.arg) for a in given):
        return False
    wide = products = False
    for node in file.own(function):
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            wide = wide or (name == "float" and isinstance(node.func, ast.Attribute) and not node.args) or name == "arange"
            wide = wide or any(
                file.dotted(a) in ("torch.float32", "torch.float") for a in (*node.args, keyword(node, "dtype")) if a is not None
            )
            products = (
                products
                or name in names.LOWER
                or name.endswith("_norm")
                or (isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "self")
            )
        elif isinstance(node, ast.BinOp):
            products = products or isinstance(node.op, ast.MatMult)
    return wide and products


def _is_kernel(file: SourceFile, function: Function) -> bool:
    """Code for a kernel language (Triton, Helion, ...), whose stores cast and whose names only look like torch's."""
    if any(last_name(d) in ("jit", "autotune", "heuristics", "kernel") for d in function.decorator_list):
        return True
    return any(isinstance(n, ast.Name) and n.id in _KERNEL_LANGUAGES and n.id in file.imports for n in file.own(function))


def _asked_for(file: SourceFile, node: ast.Call) -> set[Scenario]:
    """The scenarios in which this call may show something."""
    name = last_name(node.func)
    if name in names.SCATTER or name in names.LOWER_IN_PLACE or (name in names.LOWER and keyword(node, "out") is not None):
        return {PURE, AUTOCAST}
    if name in _TABLE:
        return {PURE, AUTOCAST}
    if name in _NORM and not file.dotted(node.func).startswith(("math.", "numpy.")):
        return {PURE, FP32_WEIGHTS}
    if name in _FLOAT_FACTORIES and keyword(node, "dtype") is None and file.dotted(node.func).startswith("torch."):
        return {PURE}
    return set()


def _run(file: SourceFile, one: _Runs, path: Path) -> None:
    function, scenario = one.function, one.scenario
    if one.steps <= 0:
        return
    run = Interpreter(file, scenario, path)
    spec = function.args
    given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    env = Env(arguments.enclosing(file, function, scenario, path))
    cls = file.parents.get(function)
    decorators = {last_name(d) for d in function.decorator_list}
    if any("autocast" in name for name in decorators):
        if scenario.autocast:
            return  # the decorator decides, and not the region around the call
        run.autocast = None
    if isinstance(cls, ast.ClassDef) and given and "staticmethod" not in decorators:
        attributes = {} if "classmethod" in decorators else class_attributes(file, cls, scenario)
        env.names[given[0].arg] = Instance(cls, attributes)
        given = given[1:]
    env.names |= arguments.bind(file, function, given, scenario, path, module=one.defaults)
    env.names |= arguments.extra(function)
    try:
        run_function(run, Closure(function, file, Env()), env)
    except Impossible:
        run.events.clear()  # what was called on the way there is not called so, either
        one.impossible = True
    except OutOfSteps:
        return
    finally:
        one.steps -= run.steps
    one.events += run.events
    for site, handed in run.launched.items():
        one.launched.setdefault(site, []).extend(handed)
    for called, dtypes in run.entered.items():
        one.entered.setdefault(called, set()).update(dtypes)
