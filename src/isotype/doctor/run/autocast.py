"""Determines the autocast state at the line that failed. When an exception hook runs, the program
has already left every autocast region. So the module determines the state from the stack frames. It
reads the `with` statements around the lines that were running, and the autocast decorators of
functions.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...observe.origin import short_path
from .expressions import UNKNOWN, node_keyword, read_value
from .frames import CallFrame, make_module_frame, parse_user_file
from .user_files import iterate_user_files

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
                if inner.is_on and frame.function == "decorate_autocast" and caller:
                    inner = replace(inner, location=f"the decorated function called at {caller}")
                elif inner.location and not frame.is_user_code and caller:
                    inner = replace(inner, location=f"{inner.location}, called at {caller}")
                state = _enter_region(state, inner, device)
    return state


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
        f"`{ast.unparse(node.func)}(...)` ({short_path(file)}:{node.lineno})"
        for file, tree, _ in iterate_user_files(frames)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".prepare")
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
        return _state_of_instance(frame.variables.get("autocast_instance"), frame)
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


def _state_of_instance(instance: Any, frame: CallFrame) -> AutocastState | None:
    if not isinstance(instance, torch.amp.autocast_mode.autocast):
        return None
    return AutocastState(
        bool(instance._enabled), instance.fast_dtype, instance.device, frame.location
    )


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
        if _surrounds(statement, frame.line):
            yield from (item.context_expr for item in statement.items)


def _read_region(node: ast.expr, frame: CallFrame) -> AutocastState | None:
    """Returns the autocast state that the expression after `with` sets, or None if it is not an
    autocast region.
    """
    if isinstance(node, ast.IfExp):
        is_first = read_value(node.test, frame)
        if is_first is UNKNOWN:
            return None
        chosen = node.body if is_first else node.orelse
        return _read_region(chosen, frame)
    if isinstance(node, (ast.Name, ast.Attribute)):
        state = _state_of_instance(read_value(node, frame), frame)
        if state is None:
            return None
        return AutocastState(state.is_on, state.dtype, state.device, frame.location_of(node))
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in _REGION_NAMES:
        return None
    function = read_value(node.func, frame)
    if isinstance(function, type) and issubclass(function, torch.amp.autocast_mode.autocast):
        return _read_constructor(node, function, frame)
    owner = read_value(node.func.value, frame) if isinstance(node.func, ast.Attribute) else UNKNOWN
    return _read_trainer_region(owner, frame.location_of(node))


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
