"""Finds the line of the user's code that gave the weights of a module their dtype. The record of the
run names calls that build, load and cast modules. Other changes, such as `parameter.data = ...` in a
helper that has returned, are searched in the source code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .arguments import find_argument, has_starred_argument, iterate_defaults, list_parameters
from .casts import has_unread_dtype, read_cast_dtype
from .expressions import CASTING_METHODS, UNKNOWN, read_value
from .frames import CallFrame, source_text
from .modules import ModelNames
from .program_source import Function, ProgramSource, SourceFile
from .recorded_origins import find_recorded_origin
from .weight_origin import PREPARATION, WeightOrigin

_MODULE_LOOP = re.compile(r"\.(?:named_)?(?:modules|children)\(")
_MAX_CALLS = 3  # calls through which a passed value is followed


class _ProgramValues(ProgramSource):
    """The source code of the user's program, and the frames in which its expressions can be read."""

    def __init__(self, frames: Sequence[CallFrame]) -> None:
        super().__init__(frames)
        self.frames = [frame for frame in frames if frame.is_user_code]

    def frame_at(self, source: SourceFile, node: ast.AST, depth: int = 0) -> CallFrame:
        """Returns a frame with the variables of the function that contains a node. If the function
        has returned, these are the values that its only call passed.
        """
        function = source.find_enclosing_function(node)
        if function is None or depth > _MAX_CALLS:
            return source.frame
        for frame in reversed(self.frames):
            if frame.scope is function:
                return frame
        variables = self.read_parameters(source, function, depth)
        variables |= self.find_object(source, function)
        return replace(source.frame, variables={**source.frame.variables, **variables})

    def read_parameters(self, source: SourceFile, function: Function, depth: int) -> dict[str, Any]:
        """Returns the values of a function's parameters that its only call passes, or their
        defaults. A value that cannot be read is UNKNOWN.
        """
        names = list_parameters(function)
        values: dict[str, Any] = dict.fromkeys(names, UNKNOWN)
        calls = self.list_calls(function.name)
        if len(calls) > 1:
            return values
        for name, default in iterate_defaults(function):
            values[name] = read_value(default, source.frame)
        for call_source, call in calls:
            frame = self.frame_at(call_source, call, depth + 1)
            for name in names:
                argument = find_argument(function, call, name, is_bound=True)
                if argument is not None:
                    values[name] = read_value(argument, frame)
                elif has_starred_argument(call):
                    values[name] = UNKNOWN
        return values

    def find_object(self, source: SourceFile, method: Function) -> dict[str, Any]:
        """Returns `self` of a method that has returned, if the frames hold one object of its
        class.
        """
        parent = source.get_parent(method)
        classes = [parent.name] if isinstance(parent, ast.ClassDef) else []
        objects = {
            id(value): value
            for frame in self.frames
            for value in frame.variables.values()
            if type(value).__name__ in classes
        }
        return {"self": next(iter(objects.values()))} if len(objects) == 1 else {}

    def is_other_model(self, source: SourceFile, node: ast.AST, module: nn.Module) -> bool:
        """True if an expression is a model that does not contain a module."""
        value = read_value(node, self.frame_at(source, node))
        return isinstance(value, nn.Module) and all(part is not module for part in value.modules())


def find_weight_origin(
    frames: Sequence[CallFrame],
    names: ModelNames,
    module: nn.Module,
    dtype: torch.dtype,
) -> WeightOrigin | None:
    """Returns the expression of the user's code that gave the weights of a module their dtype.
    Returns None if the code shows no such expression, or more than one of a kind.
    """
    recorded = find_recorded_origin(module.modules(), dtype)
    if recorded is not None:
        return recorded
    program = _ProgramValues(frames)
    path = names.module_path(module)
    for is_read in (True, False):
        casts = []
        for source in program.files:
            for node in _iterate_weight_casts(program, source, dtype, is_read):
                if _may_concern(program, source, node, module, path):
                    casts.append(_make_origin("cast", node, source))
        if dtype == torch.float32 and is_read:
            casts += list(_iterate_preparations(program, module))
        if casts:
            return casts[0] if len(casts) == 1 else None
    return None


def find_model_origin(
    frames: Sequence[CallFrame], model: nn.Module, dtype: torch.dtype
) -> WeightOrigin | None:
    """Returns the call of the user's code that loaded or cast most weights of a model. Returns None
    for a model that was only built.
    """
    recorded = find_recorded_origin(model.modules(), dtype)
    if recorded is not None:
        return None if recorded.kind in ("default", "construction") else recorded
    preparations = []
    if dtype == torch.float32:
        module = next(iter(model.children()), model)
        preparations = list(_iterate_preparations(_ProgramValues(frames), module))
    return preparations[0] if len(preparations) == 1 else None


def _make_origin(
    kind: str, node: ast.AST, source: SourceFile, call: ast.Call | None = None
) -> WeightOrigin:
    return WeightOrigin(kind, source_text(node), source.location_of(node), call)


def _iterate_weight_casts(
    program: _ProgramValues, source: SourceFile, dtype: torch.dtype, is_read: bool
) -> Iterator[ast.AST]:
    """Yields the statements that cast weights in place: `parameter.data = parameter.data.float()`,
    and `module.float()` as a statement or for each module of a loop. A tensor is not cast by a
    statement that does not use the result.

    is_read  whether the dtype of the cast must be known. Otherwise yields the casts to a variable
             that cannot be read, as in `model.to(self.dtype)`
    """
    for node in source.nodes:
        call: ast.Call | None = None
        match node:
            case ast.Assign([ast.Attribute(_, "data")], ast.Call(ast.Attribute()) as value):
                call = value
            case ast.Call(ast.Attribute(_, name)) if name in CASTING_METHODS:
                is_statement = isinstance(source.get_parent(node), ast.Expr)
                if is_statement or _is_of_module_loop(source, node):
                    call = node
        if call is not None and _is_cast_to(call, program.frame_at(source, call), dtype, is_read):
            yield node


def _is_of_module_loop(source: SourceFile, call: ast.Call) -> bool:
    """True if a call is a method of the variable of a loop over modules."""
    assert isinstance(call.func, ast.Attribute)
    receiver = ast.unparse(call.func.value)
    loops = [parent for parent, _ in source.iterate_parents(call) if isinstance(parent, ast.For)]
    return any(
        receiver in _names_in(loop.target) and _MODULE_LOOP.search(ast.unparse(loop.iter))
        for loop in loops
    )


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_cast_to(call: ast.Call, frame: CallFrame, dtype: torch.dtype, is_read: bool) -> bool:
    cast_dtype = read_cast_dtype(call, frame)
    if is_read or cast_dtype is not None:
        return is_read and cast_dtype == dtype
    return has_unread_dtype(call, frame)


def _iterate_preparations(program: _ProgramValues, module: nn.Module) -> Iterator[WeightOrigin]:
    for source, call in program.list_calls(PREPARATION):
        if not any(program.is_other_model(source, part, module) for part in call.args[:1]):
            yield _make_origin("preparation", call, source)


def _may_concern(
    program: _ProgramValues, source: SourceFile, node: ast.AST, module: nn.Module, path: str
) -> bool:
    """False if the cast is one of another attribute or model, or inside an `if` that names other
    modules, other shapes, or trained weights only.
    """
    call = node.value if isinstance(node, ast.Assign) else node
    assert isinstance(call, ast.Call)
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    for parent, part in source.iterate_parents(node):
        match parent:
            case ast.If(test, body):
                if part in body and not _may_hold(test, module, path):
                    return False
            case ast.For(iter=ast.Call(ast.Attribute(owner))):  # `in model.parameters():`
                if program.is_other_model(source, owner, module):
                    return False
    if isinstance(node, ast.Assign) or _is_of_loop(source, receiver):
        return not isinstance(receiver, ast.Attribute) or receiver.attr in (
            *path.split("."),
            "data",
        )
    if program.is_other_model(source, receiver, module):
        return False
    if isinstance(receiver, ast.Attribute):
        is_read = read_value(receiver, program.frame_at(source, receiver)) is not UNKNOWN
        return is_read or receiver.attr in (*path.split("."), "model", "module")
    return True


def _is_of_loop(source: SourceFile, receiver: ast.AST) -> bool:
    """True if an expression reads the variable of a loop, which has the value of its last pass."""
    targets = [node.target for node in source.nodes if isinstance(node, ast.For)]
    names = {name for target in targets for name in _names_in(target)}
    return not names.isdisjoint(_names_in(receiver))


def _may_hold(test: ast.expr, module: nn.Module, path: str) -> bool:
    """False if a condition is about other modules, other shapes, or trained weights only."""
    texts = [
        part.value.lower()
        for part in ast.walk(test)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    names = f"{path} {type(module).__name__}".lower()
    if texts and not any(text in names for text in texts):
        return False
    for part in ast.walk(test):
        match part:
            case ast.Call(ast.Name("isinstance"), [_, classes]):
                if not _names_class_of(classes, module):
                    return False
            case ast.Compare(left, [ast.Eq()], [ast.Constant(int() as count)]):
                is_dimension = ast.unparse(left).rpartition(".")[2] in ("ndim", "dim()")
                if is_dimension and all(p.ndim != count for p in module.parameters()):
                    return False
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    match test:
        case ast.UnaryOp(ast.Not(), ast.Attribute(_, "requires_grad")):
            return not all(parameter.requires_grad for parameter in module.parameters())
    return is_trained or "requires_grad" not in ast.unparse(test)


def _names_class_of(classes: ast.AST, module: nn.Module) -> bool:
    """True if one of the classes in an expression may be that of a module or of its parts."""
    names = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    expressions = classes.elts if isinstance(classes, ast.Tuple) else [classes]
    parts = [ast.unparse(expression).rpartition(".")[2] for expression in expressions]
    is_name_of_tuple = any(part.isupper() for part in parts)  # such as `NORM_LAYERS`
    return is_name_of_tuple or not names.isdisjoint(parts)
