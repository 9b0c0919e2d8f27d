"""Finds the loss whose backward rejects the dtype of its target: its node in autograd's graph, the
line that called it, and the variable that holds the target.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from ...observe.origin import is_library_file, short_path
from .expressions import is_tensor, node_keyword, read_value
from .forward_calls import read_forward_call
from .frames import CallFrame, make_called_frame, source_text
from .user_files import iterate_user_files

_MAX_GRAPH_NODES = 200  # nodes of an autograd graph that are searched for a loss
_MAX_ITEMS = 50  # items of a container that are compared with the target


@dataclass(frozen=True, slots=True)
class LossNode:
    """A loss in an autograd graph.

    name    such as `HuberLoss`
    target  the target that backward will use; None if the node does not keep it
    lines   the files and lines that called the loss, the innermost last. The record of tensors and
            autograd's anomaly mode note them
    call    the innermost call, if the record of tensors contains it
    """

    name: str
    target: torch.Tensor | None
    lines: Sequence[tuple[str, int]]
    call: ast.Call | None = None


@dataclass(frozen=True, slots=True)
class LossTarget:
    """The expression that a line passes to a loss as its target.

    frame_index  the index of the running frame that holds the target in a variable, or -1
    variable     the expression with which this frame reads the target
    """

    text: str
    location: str
    frame_index: int = -1
    variable: ast.expr | None = None


def find_loss_node(node: Any, dtype: torch.dtype) -> LossNode | None:
    """Returns the first loss in an autograd graph whose target has the given dtype. If no target
    has it, returns the first loss.
    """
    losses = list(_iterate_losses(node))
    matches = [loss for loss in losses if loss.target is not None and loss.target.dtype == dtype]
    return next(iter(matches or losses), None)


def _iterate_losses(node: Any) -> Iterator[LossNode]:
    pending = [node]
    visited: set[Any] = set()
    while pending and len(visited) < _MAX_GRAPH_NODES:
        node = pending.pop(0)
        if node is None or node in visited:
            continue
        visited.add(node)
        name = type(node).__name__
        if "LossBackward" in name or "CrossEntropyBackward" in name:
            lines, call = _read_lines(node)
            yield LossNode(name.partition("Backward")[0], _read_target(node), lines, call)
        pending.extend(parent for parent, _ in node.next_functions)


def _read_target(node: Any) -> torch.Tensor | None:
    try:
        target = getattr(node, "_saved_target", None)
    except RuntimeError:  # backward has freed it
        return None
    return target if isinstance(target, torch.Tensor) else None


def _read_lines(node: Any) -> tuple[list[tuple[str, int]], ast.Call | None]:
    """Returns the lines of the forward call that were recorded, and the call itself."""
    call = read_forward_call(node)
    if call is not None:
        frame = make_called_frame(*call.running)
        expression = frame.expression
        return [(frame.file, frame.line)], expression if isinstance(expression, ast.Call) else None
    entries = node.metadata.get("traceback_", ())
    matches = re.findall(r'File "([^"]+)", line (\d+), in', "".join(entries))
    return [(file, int(line)) for file, line in matches], None


def find_loss_target(frames: Sequence[CallFrame], loss: LossNode) -> LossTarget | None:
    """Returns the expression that the user's code passes to a loss as its target. The call of the
    loss is at the recorded line, in a running function, or the only one in the user's files.
    """
    index, variable = _find_variable(frames, loss.target)
    calls = []
    for file, tree, module_frame in iterate_user_files(frames):
        modules = _find_loss_modules(tree, loss)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not _calls_loss(node, modules, loss):
                continue
            if not _has_other_dtype(node, module_frame, loss):
                calls.append((file, node))
    recorded = [line for line in loss.lines if not is_library_file(line[0])][-1:]
    if recorded:
        at_line = [call for call in calls if _is_at(call, *recorded[0])]
        if loss.call is not None and _target_argument(loss.call) is not None:
            at_line = [(recorded[0][0], loss.call)]
        if len(at_line) != 1:
            return LossTarget("", f"{short_path(recorded[0][0])}:{recorded[0][1]}", index, variable)
        calls = at_line
    elif len(calls) > 1 and variable is not None:
        name = ast.unparse(variable)
        calls = [
            call
            for call in calls
            if call[0] == frames[index].file and name == _unparse(_target_argument(call[1]))
        ]
    if len(calls) != 1:
        if variable is None:
            return None
        return LossTarget(_unparse(variable), f"the call of {loss.name}", index, variable)
    file, call = calls[0]
    argument = _target_argument(call)
    text = "" if argument is None else _unparse(argument)
    line = call.lineno if argument is None else argument.lineno
    return LossTarget(text, f"{short_path(file)}:{line}", index, variable)


def _unparse(node: ast.AST | None) -> str:
    return "" if node is None else source_text(node)


def _is_at(call: tuple[str, ast.Call], file: str, line: int) -> bool:
    node = call[1]
    return call[0] == file and node.lineno <= line <= (node.end_lineno or node.lineno)


def _find_loss_modules(tree: ast.Module, loss: LossNode) -> set[str]:
    """Returns the variables and attributes to which a file assigns a module of the loss, such as
    `self.criterion` of `self.criterion = nn.HuberLoss()`.
    """
    return {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _normalise(node.value) == loss.name.lower()
    }


def _calls_loss(call: ast.Call, modules: set[str], loss: LossNode) -> bool:
    """True if a call with a target is one of the loss, such as `F.huber_loss(...)`, or one of a
    module of the loss.
    """
    if _target_argument(call) is None:
        return False
    return _normalise(call) == loss.name.lower() or ast.unparse(call.func) in modules


def _has_other_dtype(call: ast.Call, frame: CallFrame, loss: LossNode) -> bool:
    """True if a call of the loss gets a target that does not have the dtype of `loss.target`."""
    value = read_value(_target_argument(call), frame)
    return loss.target is not None and is_tensor(value) and value.dtype != loss.target.dtype


def _normalise(call: ast.Call) -> str:
    """Returns the name of the called function, as `huberloss` for `F.huber_loss`."""
    return ast.unparse(call.func).rpartition(".")[2].replace("_", "").lower()


def _target_argument(call: ast.Call) -> ast.expr | None:
    keyword = node_keyword(call, "target")
    if keyword is not None:
        return keyword
    is_plain = len(call.args) > 1 and not any(isinstance(a, ast.Starred) for a in call.args[:2])
    return call.args[1] if is_plain else None


def _find_variable(
    frames: Sequence[CallFrame], target: torch.Tensor | None
) -> tuple[int, ast.expr | None]:
    """Returns the index of the innermost frame of the user's code that holds a tensor in a
    variable, and the expression that reads it.
    """
    if target is None:
        return -1, None
    for index in reversed(range(len(frames))):
        if not frames[index].is_user_code:
            continue
        # a variable of its own comes before an item of another one
        variables = sorted(
            frames[index].variables.items(), key=lambda item: not isinstance(item[1], torch.Tensor)
        )
        for name, value in variables:
            expression = _find_in_value(ast.Name(name, ast.Load()), value, target)
            if expression is not None:
                return index, expression
    return -1, None


def _find_in_value(node: ast.expr, value: Any, target: torch.Tensor) -> ast.expr | None:
    """Returns the expression that reads a tensor from a variable: the variable itself, an item of a
    dict, list or tuple, or an attribute of an object of a class in the user's code.
    """
    if isinstance(value, torch.Tensor):
        return node if _is_same(value, target) else None
    items: list[tuple[ast.expr, Any]] = []
    if isinstance(value, Mapping):
        items = [(ast.Subscript(node, ast.Constant(key)), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(ast.Subscript(node, ast.Constant(i)), item) for i, item in enumerate(value)]
    elif _is_of_user_class(value):
        stored = getattr(value, "__dict__", {})
        items = [(ast.Attribute(node, name), item) for name, item in stored.items()]
    for expression, item in items[:_MAX_ITEMS]:
        if isinstance(item, torch.Tensor) and _is_same(item, target):
            return expression
    return None


def _is_of_user_class(value: Any) -> bool:
    """True if the class of an object has a method in the user's code."""
    methods = [m for m in vars(type(value)).values() if isinstance(m, FunctionType)]
    return any(not is_library_file(method.__code__.co_filename) for method in methods)


def _is_same(value: torch.Tensor, target: torch.Tensor) -> bool:
    """True if two tensors have one storage and one dtype, as a view and its base have."""
    if value is target:
        return True
    if not is_tensor(value) or value.dtype != target.dtype or value.device != target.device:
        return False
    try:
        address = value.untyped_storage().data_ptr()
        return address != 0 and address == target.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor of a subclass without a storage
        return False
