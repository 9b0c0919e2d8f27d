"""Finds the lines of the user's code that cast a whole model, or that set the default dtype."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...observe.origin import is_library_file, short_path
from .casts import find_cast as find_tensor_cast
from .frames import CallFrame, make_called_frame, make_returned_frame, source_text
from .hooks import find_callback_registration, is_callback
from .recorded_origins import find_cast
from .running_code import RunningCode
from .user_files import iterate_user_files
from .weight_record import RECORD


@dataclass(frozen=True, slots=True)
class ModelCast:
    """A call that casts a model.

    function  the function that contains the call, if the call is not in the main code
    callback  the callback that contains the call, and where it was registered; "" if none does
    """

    text: str
    location: str
    function: str = ""
    callback: str = ""


def find_model_cast(frames: Sequence[CallFrame], parameter: torch.Tensor) -> ModelCast | None:
    """Returns the call that cast a parameter to the dtype that it has now: in a trainer's callback,
    in another function, or in the main code. Returns None if the parameter was not cast.
    """
    recorded = find_cast(parameter)
    if recorded is None:
        return None
    origin, code = recorded
    if origin.kind == "library":
        return ModelCast(origin.text, origin.location)
    for callback in _find_callbacks(frames):
        for name, method in vars(type(callback)).items():
            if getattr(method, "__code__", None) is code:
                files = [frame.file for frame in frames if frame.is_user_code]
                location = find_callback_registration(callback, files)
                owner = f"{type(callback).__name__}.{name}"
                place = f"{owner}, registered at {location}" if location else owner
                return ModelCast(origin.text, origin.location, owner, place)
    is_running = any(frame.code is code for frame in frames)
    function = "" if is_running or code.co_name == "<module>" else code.co_name
    return ModelCast(origin.text, origin.location, function)


def find_unwrapping(frames: Sequence[CallFrame]) -> ModelCast | None:
    """Returns the call `unwrap_model(..., keep_fp32_wrapper=False)` of the user's files, which
    removes autocast from the forward of a model that accelerate prepared. Returns None if there is
    no such call, or more than one.
    """
    return _find_only_node(frames, _is_unwrapping)


def _is_unwrapping(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    values = [k.value for k in node.keywords if k.arg == "keep_fp32_wrapper"]
    is_false = [isinstance(value, ast.Constant) and value.value is False for value in values]
    return node.func.attr == "unwrap_model" and any(is_false)


def find_tensor_format(frames: Sequence[CallFrame], columns: Sequence[str]) -> ModelCast | None:
    """Returns the call `with_format("torch")` or `set_format("torch")` of a dataset that makes
    tensors of all columns. `function` of the result is the call with these columns only. Returns
    None if there is no such call, or more than one.
    """
    setter = _find_only_node(frames, _formats_all_columns)
    if setter is None:
        return None
    call = ast.parse(setter.text, mode="eval").body
    assert isinstance(call, ast.Call)
    call.keywords.append(ast.keyword("columns", ast.parse(repr(list(columns)), mode="eval").body))
    return ModelCast(setter.text, setter.location, ast.unparse(call))


def _formats_all_columns(node: ast.AST) -> bool:
    match node:
        case ast.Call(ast.Attribute(_, "with_format" | "set_format"), [ast.Constant("torch")]):
            is_torch = True
        case ast.Call(ast.Attribute(_, "with_format" | "set_format"), []):
            values = [k.value for k in node.keywords if k.arg == "type"]
            is_torch = any(isinstance(v, ast.Constant) and v.value == "torch" for v in values)
        case _:
            return False
    return is_torch and all(keyword.arg != "columns" for keyword in node.keywords)


def find_state_write(frames: Sequence[CallFrame]) -> ModelCast | None:
    """Returns the assignment of the user's files that puts states into an optimizer, such as
    `optimizer.state[p] = ...`. Returns None if there is no such line, or more than one.
    """
    return _find_only_node(frames, _is_state_write)


def find_state_cast(frames: Sequence[CallFrame], dtype: torch.dtype) -> ModelCast | None:
    """Returns the assignment that casts the states of an optimizer to a dtype and puts them back, as
    code does that loads a checkpoint. The functions that are running do not count: they create
    states. Returns None if there is no such line, or more than one.
    """
    casts = []
    for file, tree, module_frame in iterate_user_files(frames):
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            if any(frame.scope is function for frame in frames):
                continue
            for node in _iterate_state_writes(function):
                if find_tensor_cast(node.value, module_frame, dtype) is not None:
                    location = f"{short_path(file)}:{node.lineno}"
                    casts.append(ModelCast(source_text(node), location))
    return casts[0] if len(casts) == 1 else None


def _iterate_state_writes(function: ast.FunctionDef) -> Iterator[ast.Assign]:
    """Yields the assignments `optimizer.state[p][key] = ...`, and `state[key] = ...` where `state` was
    read from `optimizer.state`.
    """
    aliases = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Name(name)], value) if ".state" in ast.unparse(value):
                aliases.add(name)
            case ast.For(ast.Tuple([*_, ast.Name(name)]), values) if ".state" in ast.unparse(
                values
            ):
                aliases.add(name)
    for node in ast.walk(function):
        match node:
            case ast.Assign([ast.Subscript(ast.Name(name))]) if name in aliases:
                yield node
            case ast.Assign() if _is_state_write(node):
                yield node


def _describe_node(node: ast.AST) -> str:
    """Returns the source code of a node. The value of an assignment is left out."""
    if isinstance(node, ast.Assign):
        return f"{ast.unparse(node.targets[0])} = ..."
    return ast.unparse(node)


def _is_state_write(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        target: ast.AST = node.targets[0]
        while isinstance(target, ast.Subscript):
            target = target.value
            if isinstance(target, ast.Attribute) and target.attr == "state":
                return True
        return False
    match node:
        case ast.Call(ast.Attribute(ast.Subscript(ast.Attribute(_, "state"), _), "update"), _):
            return True
    return False


_CREATIONS_IN_DEFAULT_DTYPE = frozenset(
    ("zeros", "ones", "empty", "full", "rand", "randn", "linspace", "logspace", "eye", "tensor")
)


def find_default_dtype_creation(frames: Sequence[CallFrame], content: Any) -> ModelCast | None:
    """Returns the call in a checkpointed function or module that creates a tensor in the default
    dtype, if the user's files set the default dtype. `function` of the result is the line that
    sets it.
    """
    function = (
        getattr(type(content), "forward", None) if isinstance(content, nn.Module) else content
    )
    frame = make_returned_frame(function, {})
    setter = _find_first_node(frames, _sets_default_dtype)
    if frame is None or frame.scope is None or setter is None:
        return None
    for node in ast.walk(frame.scope):
        if isinstance(node, ast.Call) and creates_in_default_dtype(node):
            return ModelCast(ast.unparse(node), frame.location_of(node), setter.location)
    return None


def find_default_dtype_setter(frames: Sequence[CallFrame]) -> ModelCast | None:
    """Returns the call that set the default dtype. If the record does not contain it, returns the
    first call in the user's files that sets a default dtype.
    """
    recorded = find_recorded_default_dtype_setter(frames, torch.get_default_dtype())
    return recorded or _find_first_node(frames, _sets_default_dtype)


def find_recorded_default_dtype_setter(
    frames: Sequence[CallFrame], dtype: torch.dtype
) -> ModelCast | None:
    """Returns the last call of the user's code that set this default dtype. `function` of the result
    is the call of a running function in which it happened, if this has ended. Returns None for a
    call that restores a dtype which was the default before.
    """
    events = RECORD.default_dtype_events
    for index in reversed(range(len(events))):
        calls = events[index].calls
        if events[index].dtype != dtype or not calls:
            continue
        if is_library_file(calls[0].code.co_filename):
            continue  # such as `from_pretrained`, which restores it
        if index and _restores_default_dtype(calls[0], events[index - 1].calls):
            return None
        setter = make_called_frame(calls[0].code, calls[0].instruction)
        return ModelCast(setter.text, setter.location, _find_ended_call(frames, calls[1:]))
    return None


def _restores_default_dtype(call: RunningCode, previous: Sequence[RunningCode]) -> bool:
    """True if the function of a call had set the default dtype in another line before, or if it is
    the end of a context manager.
    """
    if call.code.co_name == "__exit__":
        return True
    is_same_function = bool(previous) and previous[0].code is call.code
    return is_same_function and previous[0].instruction != call.instruction


def _find_ended_call(frames: Sequence[CallFrame], calls: Sequence[RunningCode]) -> str:
    """Returns the code and the place of the call in a function that is still running, at a later
    line, or "".
    """
    for call in calls:
        for frame in frames:
            if frame.code is call.code:
                ended = make_called_frame(call.code, call.instruction)
                node = ended.expression
                if ended.position == frame.position or not isinstance(node, ast.expr):
                    return ""
                return f"{source_text(node)}` at {ended.location}"
    return ""


def find_unrestored_default_dtype(frames: Sequence[CallFrame]) -> ModelCast | None:
    """Returns the call that sets the default dtype in a function that has returned, and that may
    leave it so. Returns None if there is no such function, or if other code sets it too.
    """
    setters = []
    count = len(list(_iterate_nodes(frames, _sets_default_dtype)))
    for file, tree, _ in iterate_user_files(frames):
        running = {frame.function for frame in frames if frame.file == file}
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function.name in running:
                continue
            calls = find_unrestored_calls(function)
            if calls and len(calls) == count:
                first = min(calls, key=lambda call: call.lineno)
                location = f"{short_path(file)}:{first.lineno}"
                setters.append(ModelCast(ast.unparse(first), location, function.name))
    return setters[0] if len(setters) == 1 else None


def find_unrestored_calls(function: ast.FunctionDef) -> list[ast.Call]:
    """Returns the calls of a function that set the default dtype, if the function is meant to
    restore it, and may return before. A function is meant to restore it if it reads it, or sets it
    twice. A `finally` block always restores it, and a context manager does so later.
    """
    nodes = list(ast.walk(function))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _sets_default_dtype(node)]
    is_context = function.name == "__enter__" or any(isinstance(node, ast.Yield) for node in nodes)
    final_nodes = [
        part
        for node in nodes
        if isinstance(node, ast.Try)
        for statement in node.finalbody
        for part in ast.walk(statement)
    ]
    is_restored = any(_sets_default_dtype(node) for node in final_nodes)
    is_meant = len(calls) > 1 or any(reads_default_dtype(node) for node in nodes)
    return calls if is_meant and not is_context and not is_restored else []


def reads_default_dtype(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_default_dtype")


def creates_in_default_dtype(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    is_creation = owner == "torch" and name in _CREATIONS_IN_DEFAULT_DTYPE
    return is_creation and all(keyword.arg != "dtype" for keyword in call.keywords)


def _sets_default_dtype(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("set_default_dtype")


def _find_only_node(
    frames: Sequence[CallFrame], is_wanted: Callable[[ast.AST], bool]
) -> ModelCast | None:
    nodes = list(_iterate_nodes(frames, is_wanted))
    return nodes[0] if len(nodes) == 1 else None


def _find_first_node(
    frames: Sequence[CallFrame], is_wanted: Callable[[ast.AST], bool]
) -> ModelCast | None:
    return next(_iterate_nodes(frames, is_wanted), None)


def _iterate_nodes(
    frames: Sequence[CallFrame], is_wanted: Callable[[ast.AST], bool]
) -> Iterator[ModelCast]:
    for file, tree, _ in iterate_user_files(frames):
        for node in ast.walk(tree):
            if is_wanted(node):
                line = getattr(node, "lineno", 0)
                yield ModelCast(_describe_node(node), f"{short_path(file)}:{line}")


def _find_callbacks(frames: Sequence[CallFrame]) -> list[Any]:
    """Returns the callbacks of the trainers in the frames."""
    callbacks: dict[int, Any] = {}
    for frame in frames:
        owner = frame.variables.get("self")
        stored = getattr(owner, "__dict__", {})
        for holder in [owner, *stored.values()]:
            items = getattr(holder, "__dict__", {}).get("callbacks")
            if isinstance(items, list):
                callbacks |= {id(item): item for item in items if is_callback(item)}
    return list(callbacks.values())
