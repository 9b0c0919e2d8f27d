"""Finds what changed between forward and backward in a function under gradient checkpointing, which
runs again in backward.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from .bindings import find_assigned_call
from .expressions import UNKNOWN, node_keyword, read_value
from .frames import CallFrame, make_returned_frame
from .modules import ModelNames
from .user_files import iterate_user_files

_CHECKPOINT_FILE = "torch/utils/checkpoint.py"


@dataclass(frozen=True, slots=True)
class ChangedState:
    """A statement that changes what a checkpointed function reads.

    name       the attribute or global variable that it writes
    is_inside  whether the checkpointed function itself contains the statement
    context    the `with` of the running code that calls the statement, as a context manager; ""
               if none does
    """

    name: str
    text: str
    location: str
    is_inside: bool
    context: str = ""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The second run of a checkpointed function.

    content  the checkpointed function or module
    inputs   the tensors that forward saved for the second run
    """

    content: Any
    inputs: Sequence[torch.Tensor]

    def describe(self, names: ModelNames) -> str:
        if self.module is not None:
            path = names.module_path(self.module)
            return f"{type(self.module).__name__} {path}" if path.isdigit() else path
        return str(getattr(self.content, "__qualname__", "the checkpointed function"))

    @property
    def module(self) -> nn.Module | None:
        owner = getattr(self.content, "__self__", self.content)
        return owner if isinstance(owner, nn.Module) else None

    def iterate_code(self) -> Iterator[CallFrame]:
        """Yields frames for the functions of the user's code that run again: the function, or the
        methods of the module and of its submodules.
        """
        functions = [] if isinstance(self.content, nn.Module) else [self.content]
        for module in () if self.module is None else self.module.modules():
            for function in filter(inspect.isfunction, vars(type(module)).values()):
                functions.append(MethodType(function, module))
        for function in functions:
            frame = make_returned_frame(function, {})
            if frame is not None and frame.function != "__init__":
                yield frame


def find_recomputation(frames: Sequence[CallFrame]) -> Recomputation | None:
    """Returns the checkpointed function that torch was running again, or whose second run torch
    compared with the first one. Returns None if there is none.
    """
    for frame in reversed(frames):
        if not frame.file.replace("\\", "/").endswith(_CHECKPOINT_FILE):
            continue
        variables = frame.variables
        if frame.function == "recompute_fn":
            return _make_recomputation(variables.get("fn"), variables.get("args"))
        if frame.function == "backward":
            function = getattr(variables.get("ctx"), "run_function", None)
            return _make_recomputation(function, variables.get("detached_inputs"))
        recompute = getattr(variables.get("frame"), "recompute_fn", None)
        names = getattr(getattr(recompute, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(recompute, "__closure__", None) or ()):
            if name == "fn":
                return _make_recomputation(cell.cell_contents, ())
    return None


def read_autocast_with_cache(frames: Sequence[CallFrame]) -> torch.dtype | None:
    """Returns the dtype of autocast where a checkpointed function ran first, if autocast and its
    cache were on there. Torch keeps the settings of autocast for the second run.
    """
    for frame in frames:
        if frame.function == "recompute_fn" and frame.file.endswith(_CHECKPOINT_FILE):
            for name in ("device_autocast_kwargs", "cpu_autocast_kwargs"):
                settings = frame.variables.get(name)
                settings = settings if isinstance(settings, dict) else {}
                dtype = settings.get("dtype")
                if settings.get("enabled") and settings.get("cache_enabled"):
                    return dtype if isinstance(dtype, torch.dtype) else None
    return None


def _make_recomputation(content: Any, inputs: Any) -> Recomputation:
    while isinstance(content, functools.partial):
        content = content.func
    is_tensor = [isinstance(item, torch.Tensor) for item in inputs or ()]
    return Recomputation(content, [item for item, keep in zip(inputs or (), is_tensor) if keep])


def find_changed_states(
    recomputation: Recomputation, frames: Sequence[CallFrame]
) -> list[ChangedState]:
    """Returns the statements of the user's files that write an attribute or a global variable which
    the checkpointed function reads.
    """
    reads: dict[str, set[str]] = {}  # name -> classes of the objects with this attribute
    inner_lines: set[tuple[str, int]] = set()
    for frame in recomputation.iterate_code():
        for node in ast.walk(frame.scope or ast.Module([], [])):
            inner_lines.add((frame.file, getattr(node, "lineno", 0)))
            match node:
                case ast.Attribute(owner, name, ast.Load()):
                    value = read_value(owner, frame)
                    if value is not UNKNOWN and not isinstance(value, torch.Tensor):
                        reads.setdefault(name, set()).update(
                            kind.__name__ for kind in type(value).__mro__
                        )
                case ast.Name(name, ast.Load()) if name not in frame.code.co_varnames:
                    reads.setdefault(name, set())
    states: dict[str, ChangedState] = {}
    for file, tree, module_frame in iterate_user_files(frames):
        first_line = _line_after_forward(file, frames)
        for node, function, owner_class in _iterate_later_statements(tree, first_line):
            name = _written_name(node, reads, owner_class)
            is_inside = (file, node.lineno) in inner_lines
            if name and (is_inside or name not in states):
                source = ast.unparse(node)
                text = source if len(source) <= 40 else f"{source.partition('=')[0].strip()} = ..."
                location = module_frame.location_of(node)
                context = "" if is_inside else _find_context(function, owner_class, frames)
                states[name] = ChangedState(name, text, location, is_inside, context)
    return list(states.values())


def _find_context(function: str, owner_class: str, frames: Sequence[CallFrame]) -> str:
    """Returns the `with` of the running functions that enters a context manager, and its place. The
    context manager is a function, or a class with `__enter__`.
    """
    name = owner_class if function in ("__enter__", "__exit__") else function
    for frame in reversed(frames):
        scope = frame.scope if frame.is_user_code else None
        for node in () if scope is None else ast.walk(scope):
            for item in node.items if isinstance(node, ast.With) else ():
                call = item.context_expr
                called = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                if name and called.rpartition(".")[2] == name:
                    return f"`with {ast.unparse(call)}:` ({frame.location_of(node)})"
    return ""


def _line_after_forward(file: str, frames: Sequence[CallFrame]) -> int | None:
    """Returns the line of the main code that computed the loss, if the code then runs `backward` in
    a statement of its own. Otherwise returns None.
    """
    for frame in frames:
        if frame.file != file or not isinstance(frame.scope, ast.Module):
            continue
        for node in ast.walk(frame.statement or ast.Module([], [])):
            match node:
                case ast.Call(ast.Attribute(ast.Name() as loss, "backward"), _):
                    call = find_assigned_call(loss, frame)
                    return None if call is None else call.lineno
    return None


def _iterate_later_statements(
    tree: ast.Module, first_line: int | None
) -> Iterator[tuple[Any, str, str]]:
    """Yields the assignments of a file that may run after the forward, each with its function and
    its class: those in functions, except `__init__`, and those of the main code from a line on.
    """
    pending: list[tuple[Any, str, str]] = [(tree, "", "")]
    while pending:
        node, function, owner_class = pending.pop()
        if isinstance(node, ast.ClassDef):
            owner_class = node.name
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == "__init__":
                continue
            function = node.name
        is_later = bool(function) or (first_line is not None and _line_of(node) >= first_line)
        if isinstance(node, (ast.Assign, ast.AugAssign)) and is_later:
            yield node, function, owner_class
        pending.extend((child, function, owner_class) for child in ast.iter_child_nodes(node))


def _line_of(node: Any) -> int:
    return int(getattr(node, "lineno", 0))


def _written_name(node: Any, reads: Mapping[str, set[str]], owner_class: str) -> str:
    """Returns the attribute or global variable that an assignment writes, if it is one of `reads`.
    An attribute of `self` must belong to a class whose objects are read.
    """
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    for part in parts:
        target = part
        while isinstance(target, ast.Subscript):
            target = target.value
        match target:
            case ast.Attribute(ast.Name("self"), name):
                if owner_class in reads.get(name, ()):
                    return name
            case ast.Attribute(_, name) if reads.get(name):
                return name
            case ast.Name(name) if name in reads and target is not part:
                return name
    return ""


def find_inner_autocast(recomputation: Recomputation) -> tuple[str, str] | None:
    """Returns the autocast region inside the checkpointed function that a variable switches on, and
    its place.
    """
    for frame in recomputation.iterate_code():
        for node in ast.walk(frame.scope or ast.Module([], [])):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("autocast"):
                continue
            enabled = node_keyword(node, "enabled")
            if enabled is not None and not isinstance(enabled, ast.Constant):
                return ast.unparse(node), frame.location_of(node)
    return None
