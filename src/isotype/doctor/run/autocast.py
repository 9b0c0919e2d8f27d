"""Determines the autocast state at the line that failed. When an exception hook runs, the program
has already left every autocast region. So the module determines the state from the stack frames. It
reads the `with` statements around the lines that were running, and the autocast decorators of
functions.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .expressions import UNKNOWN, node_keyword, read_condition, read_function, read_value
from .frames import CallFrame, make_module_frame, make_returned_frame, parse_user_file
from .program_source import ProgramSource

_MAX_CALLS = 3  # functions that return the context manager of another one
_NAMES_PRECISION = re.compile(r"autocast|precision|\bamp\b|(?:^|_)amp(?:_|$)", re.IGNORECASE)
_REGION_NAMES = ("autocast", "autocast_smart_context_manager", "compute_loss_context_manager")


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The state of autocast at a line.

    dtype     None if it cannot be read from the frames
    is_on     None if it cannot be read from the frames
    location  the line that set the state; "" if none did
    lost_at   the line of an autocast region that has no effect, because the code runs in a new
              thread; "" if there is none
    unused_device  the device of an autocast region that has no effect, because the tensors are on
                   another device; "" if there is none
    unused_at      the line of this region
    runs_model     whether the code of the region names the model that was running
    """

    is_on: bool | None = False
    dtype: torch.dtype | None = None
    device: str = ""
    location: str = ""
    lost_at: str = ""
    unused_device: str = ""
    unused_at: str = ""
    runs_model: bool = True


OFF = AutocastState()


def read_autocast_state(frames: Sequence[CallFrame], device: str = "") -> AutocastState:
    """Returns the autocast state at the running line of the innermost frame.

    device  the type of the device that computes; "" if it is not known
    """
    state = OFF
    caller = ""
    for frame in frames:
        if frame.is_user_code:
            caller = frame.location
        if starts_thread(frame):
            lost_at = state.location if state.is_on else ""
            state = AutocastState(lost_at=lost_at)
        states = [_state_of_decorator(frame)]
        states += [_read_region(region, frame) for region in _surrounding_regions(frame)]
        for inner in states:
            if inner is not None:
                state = _enter_region(state, name_caller(inner, frame, caller), device)
    return state


def name_caller(state: AutocastState, frame: CallFrame, caller: str) -> AutocastState:
    """Returns the state of a region in a frame. If the frame is one of a library, its location names
    the line of the user's code that called it.
    """
    if frame.is_user_code or not state.location or not caller:
        return state
    if state.is_on and frame.function == "decorate_autocast":
        return replace(state, location=f"the decorated function called at {caller}")
    return replace(state, location=f"{state.location}, called at {caller}")


def _enter_region(outer: AutocastState, inner: AutocastState, device: str) -> AutocastState:
    """Returns the state of autocast on a device inside a region."""
    if not device or inner.device in ("", device):
        return inner
    if not inner.is_on:
        return outer
    return replace(outer, unused_device=inner.device, unused_at=inner.location)


def read_frame_region(frame: CallFrame) -> AutocastState | None:
    """Returns the autocast state that the code of one frame sets for its running line: the
    innermost region around the line, or the decorator of the function. Returns None if the frame
    leaves the state as it is.
    """
    state = None
    for region in (*getattr(frame.scope, "decorator_list", ()), *_surrounding_regions(frame)):
        state = _read_region(region, frame) or state
    return state


def find_output_cast(module: nn.Module, frames: Sequence[CallFrame]) -> str:
    """Returns where accelerate was told to cast the results of a module to fp32, as a part of a
    sentence. Returns "" if it does not cast them. `Accelerator.prepare` wraps the forward of a
    model if mixed precision is on.
    """
    forward = getattr(module, "__dict__", {}).get("forward")
    forward = getattr(forward, "__func__", forward)
    if type(getattr(forward, "__wrapped__", None)).__name__ != "ConvertOutputsToFp32":
        return ""
    calls = [
        f"`{ast.unparse(call.func)}(...)` ({source.location_of(call)})"
        for source, call in ProgramSource(frames).list_calls("prepare")
        if isinstance(call.func, ast.Attribute)
    ]
    call = calls[0] if len(calls) == 1 else "Accelerator.prepare"
    return f"{call} makes accelerate cast the results of the model to fp32"


def find_other_region(
    frames: Sequence[CallFrame], model: nn.Module | None = None
) -> AutocastState | None:
    """Searches the user's functions on the stack for an autocast region that does not contain the
    running line. Then searches the user's files for a region in which other code calls the same
    model. Returns the autocast state of the region, or None if there is no such region.
    """
    names = _names_of_model(frames, model)
    # modules come last, because their code contains that of their functions
    for frame in sorted(frames, key=lambda frame: isinstance(frame.scope, ast.Module)):
        scope = frame.scope
        if scope is None or not frame.is_user_code:
            continue
        region = _find_region(scope, frame, None)
        if region is not None:
            runs_model = not names or _names_any(region[1], names)
            return replace(region[0], runs_model=runs_model)
    for frame in frames:
        tree = parse_user_file(frame.file)
        module_frame = make_module_frame(frame)
        if tree is not None and module_frame is not None:
            region = _find_region(tree, replace(module_frame, line=frame.line), names)
            if region is not None:
                return region[0]
    return None


def _find_region(
    scope: ast.AST, frame: CallFrame, model_names: set[str] | None
) -> tuple[AutocastState, ast.With] | None:
    """Returns the first autocast region in a piece of code that does not contain the running line,
    and its state.

    model_names  if given, the region must call one of these names
    """
    for node in ast.walk(scope):
        if not isinstance(node, ast.With) or _surrounds(node, frame.line):
            continue
        if model_names is not None and not _calls_name(node, model_names):
            continue
        for item in node.items:
            state = _read_region(item.context_expr, frame)
            if state is not None and state.is_on:
                return state, node
    return None


def _names_any(scope: ast.AST, names: set[str]) -> bool:
    """True if code contains one of these names as a variable or an attribute."""
    variables = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(scope) if isinstance(node, ast.Attribute)}
    return not names.isdisjoint(variables | attributes)


def _names_of_model(frames: Sequence[CallFrame], model: nn.Module | None) -> set[str]:
    """Returns the variables and attributes of `self` that hold a model or a module around it."""
    names = set()
    for frame in frames:
        stored = getattr(frame.variables.get("self"), "__dict__", {})
        for name, value in (*frame.variables.items(), *stored.items()):
            parts = value.modules() if isinstance(value, nn.Module) and name != "self" else ()
            if any(part is model for part in parts):
                names.add(name)
    return names


def _calls_name(scope: ast.AST, names: set[str]) -> bool:
    functions = [node.func for node in ast.walk(scope) if isinstance(node, ast.Call)]
    return any(ast.unparse(function).rpartition(".")[2] in names for function in functions)


def starts_thread(frame: CallFrame) -> bool:
    """True if this frame is the first frame of a thread."""
    return frame.function == "run" and frame.file.endswith(
        ("threading.py", os.path.join("futures", "thread.py"))
    )


def _state_of_decorator(frame: CallFrame) -> AutocastState | None:
    """Returns the autocast state that the decorator of a function sets. The decorator is
    `@torch.autocast(...)`, `custom_fwd` or `custom_bwd`.
    """
    if f"{os.sep}torch{os.sep}amp" not in frame.file:
        return None
    if frame.function == "decorate_autocast":
        return _read_context(frame.variables.get("autocast_instance"), frame.location, 0)
    arguments = frame.variables.get("args")
    if frame.function == "decorate_bwd" and arguments:
        context = arguments[0]
        return AutocastState(
            bool(getattr(context, "_fwd_used_autocast", False)),
            getattr(context, "_dtype", None),
            str(frame.variables.get("device_type", "")),
            frame.location,
        )
    if frame.function == "decorate_fwd" and frame.variables.get("cast_inputs") is not None:
        return AutocastState(False, location=frame.location)
    return None


def _surrounds(node: ast.With, line: int) -> bool:
    return bool(node.body) and node.body[0].lineno <= line <= (node.end_lineno or line)


def _surrounding_regions(frame: CallFrame) -> Iterator[ast.expr]:
    """Yields the context expressions of the `with` statements around the running line. The
    outermost statement comes first.
    """
    scope = frame.scope
    if scope is None:
        return
    statements = [node for node in ast.walk(scope) if isinstance(node, ast.With)]
    for statement in sorted(statements, key=lambda node: node.lineno):
        if not _surrounds(statement, frame.line):
            continue
        for item in statement.items:
            yield item.context_expr
            if isinstance(item.optional_vars, ast.Name):
                yield from _entered_contexts(statement, item.optional_vars.id, frame.line)


def _entered_contexts(statement: ast.With, stack: str, line: int) -> Iterator[ast.expr]:
    """Yields the context managers that code of a `with` statement passed to the method
    `enter_context` of an `ExitStack` before a line.
    """
    for node in ast.walk(statement):
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), "enter_context"), [context]):
                if owner == stack and (node.end_lineno or node.lineno) < line:
                    yield context


def _read_region(node: ast.expr, frame: CallFrame, depth: int = 0) -> AutocastState | None:
    """Returns the autocast state that the expression after `with` sets, or None if it is not an
    autocast region. The state is not known if the expression may be a region that cannot be read.
    """
    location = frame.location_of(node)
    if isinstance(node, ast.IfExp):
        holds = read_condition(node.test, frame)
        if holds is not None:
            return _read_region(node.body if holds else node.orelse, frame, depth)
        states = [_read_region(part, frame, depth) for part in (node.body, node.orelse)]
        return next((AutocastState(None, location=location) for state in states if state), None)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _read_context(read_value(node, frame), location, depth)
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    function = read_function(node.func, frame)
    if isinstance(function, type) and issubclass(function, torch.amp.autocast_mode.autocast):
        return _read_constructor(node, function, frame)
    trainer_state = None
    if name in _REGION_NAMES:
        method = node.func
        owner = read_value(method.value, frame) if isinstance(method, ast.Attribute) else UNKNOWN
        trainer_state = _read_trainer_region(owner, location)
        if trainer_state is None or trainer_state.is_on is not None:
            return trainer_state
    returned = _read_returned_context(function, node, frame, depth)
    if returned is not None:
        return returned[0] and replace(returned[0], location=location)
    if trainer_state is not None:
        return trainer_state
    if _NAMES_PRECISION.search(ast.unparse(node.func)):
        return AutocastState(None, location=location)
    return None


def _read_context(context: Any, location: str, depth: int) -> AutocastState | None:
    """Returns the autocast state that a context manager sets. The context manager is an instance of
    `torch.autocast`, the result of a generator with the decorator `contextmanager`, or an object
    that holds one of these in an attribute.
    """
    if isinstance(context, torch.amp.autocast_mode.autocast):
        enabled, dtype = bool(context._enabled), context.fast_dtype
        return AutocastState(enabled, dtype, context.device, location)
    if depth > _MAX_CALLS or not isinstance(context, contextlib.AbstractContextManager):
        return None
    function = getattr(context, "func", None)
    if inspect.isfunction(function):  # of contextlib.contextmanager
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        arguments = {
            **dict(zip(names, getattr(context, "args", ()))),
            **getattr(context, "kwds", {}),
        }
        returned = _read_returns(function, arguments, depth)
        return returned and returned[0] and replace(returned[0], location=location)
    for value in list(getattr(context, "__dict__", {}).values()):
        state = _read_context(value, location, depth + 1)
        if state is not None:
            return state
    return None


def _read_returned_context(
    function: Any, call: ast.Call, frame: CallFrame, depth: int
) -> tuple[AutocastState | None] | None:
    """Returns the autocast state that the context manager sets which a function of the user's code
    returns. Returns None if the function is not known, or is one of a library.
    """
    call_method = inspect.getattr_static(type(function), "__call__", None)
    if isinstance(call_method, FunctionType) and not isinstance(function, torch.nn.Module):
        function = MethodType(call_method, function)  # an object that is called
    if not isinstance(function, (FunctionType, MethodType)):
        return None
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    names = list(code.co_varnames)
    if inspect.ismethod(function):
        names = names[1:]
    arguments = {name: read_value(argument, frame) for name, argument in zip(names, call.args)}
    for keyword in call.keywords:
        if keyword.arg is not None:
            arguments[keyword.arg] = read_value(keyword.value, frame)
    return _read_returns(function, arguments, depth)


def _read_returns(
    function: Any, arguments: Mapping[str, Any], depth: int
) -> tuple[AutocastState | None] | None:
    """Returns the autocast state around the `yield` of a generator, or of the context manager that
    a function returns. The state is not known if the function returns several in branches whose
    conditions cannot be read. Returns None if the function's code is not known.
    """
    frame = make_returned_frame(function, arguments, in_libraries=True)
    if frame is None or depth > _MAX_CALLS:
        return None
    states: list[AutocastState | None] = []
    for node in ast.walk(frame.scope or ast.Pass()):
        is_yield = isinstance(node, ast.Yield)  # also without a value, in a context manager
        if not isinstance(node, (ast.Yield, ast.Return)):
            continue
        if node.value is None and not is_yield:
            continue
        is_run = _read_branch(node, frame)
        if is_run is False:
            continue
        inner = replace(frame, line=node.lineno)
        if isinstance(node, ast.Return):
            regions = [_returned_node(node, frame)]
        else:
            regions = list(_surrounding_regions(inner))
        inner_states = [_read_region(region, inner, depth + 1) for region in regions]
        states.append(next((state for state in reversed(inner_states) if state), None))
        if is_run and not is_yield:
            break
    if len({(state.is_on, state.dtype) if state else None for state in states}) > 1:
        return (AutocastState(None),)
    return (states[0] if states else None,)


def _returned_node(node: ast.Return, frame: CallFrame) -> ast.expr:
    """Returns the expression of a `return`, or of the only assignment to the name in it."""
    value = node.value
    assert value is not None
    if not isinstance(value, ast.Name) or frame.scope is None:
        return value
    assigned = [
        part.value
        for part in ast.walk(frame.scope)
        if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == value.id
    ]
    return assigned[0] if len(assigned) == 1 else value


def _read_branch(node: ast.AST, frame: CallFrame) -> bool | None:
    """True if all conditions around a node of a function hold, False if one does not, and None if
    this cannot be read.
    """
    results: list[bool | None] = []
    for branch in ast.walk(frame.scope or node):
        if not isinstance(branch, ast.If):
            continue
        holds = read_condition(branch.test, frame)
        if any(part is node for statement in branch.body for part in ast.walk(statement)):
            results.append(holds)
        elif any(part is node for statement in branch.orelse for part in ast.walk(statement)):
            results.append(None if holds is None else not holds)
    if False in results:
        return False
    return None if None in results else True


def _read_constructor(node: ast.Call, function: type, frame: CallFrame) -> AutocastState:
    """Returns the autocast state that a call of `torch.autocast` sets. The function only reads the
    arguments of this call. It runs no code of the program to compute them.
    """
    arguments = list(node.args)
    device = function.__module__.split(".")[1]  # torch.cuda.amp, torch.cpu.amp
    if device == "amp":
        value = read_value(
            arguments.pop(0) if arguments else node_keyword(node, "device_type"), frame
        )
        device = str(value).partition(":")[0] if value is not UNKNOWN else "cuda"
        dtype_node = arguments[0] if arguments else node_keyword(node, "dtype")
    else:
        dtype_node = arguments[1] if len(arguments) > 1 else node_keyword(node, "dtype")
    dtype = read_value(dtype_node, frame)
    if not isinstance(dtype, torch.dtype):
        is_default = dtype_node is None or dtype is None
        dtype = torch.get_autocast_dtype(device) if is_default else None
    enabled = True
    if (enabled_node := node_keyword(node, "enabled")) is not None:
        enabled = read_value(enabled_node, frame)
    for keyword in node.keywords:
        if keyword.arg is None:  # as in torch.utils.checkpoint
            options = read_value(keyword.value, frame)
            if not isinstance(options, dict):
                return AutocastState(None, dtype, device, frame.location_of(node))
            enabled = options.get("enabled", enabled)
            dtype = options.get("dtype", dtype)
    is_on = None if enabled is UNKNOWN else bool(enabled)
    return AutocastState(is_on, dtype, device, frame.location_of(node))


def _read_trainer_region(owner: Any, location: str) -> AutocastState | None:
    """Returns the autocast state that `accelerator.autocast()` or a context manager of a Trainer
    sets. Without mixed precision they leave the state as it is, and the result is None.
    """
    accelerator = getattr(owner, "__dict__", {}).get("accelerator", owner)
    setting = read_mixed_precision(accelerator)
    if setting is None:
        return AutocastState(None, location=location)
    if setting == "no":
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting)
    device = getattr(getattr(accelerator, "device", None), "type", "")
    return AutocastState(dtype is not None, dtype, device, location)


def read_mixed_precision(accelerator: Any) -> str | None:
    """Returns the attribute `mixed_precision` of an Accelerator, which is `no`, `bf16`, `fp16` or
    `fp8`. Returns None for other objects.
    """
    if type(accelerator).__name__ != "Accelerator":
        return None
    state = getattr(accelerator, "state", None)
    setting = getattr(state, "_mixed_precision", None)
    return setting if isinstance(setting, str) else None
