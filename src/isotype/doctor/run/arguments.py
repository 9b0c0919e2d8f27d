"""Finds the expression that a call passes for a parameter of a function, or the default of the
parameter.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from .bindings import find_earlier_bindings
from .expressions import UNKNOWN, read_value
from .frames import CallFrame


def list_parameters(scope: Any) -> list[str]:
    arguments = scope.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def list_positional_parameters(scope: Any, is_bound: bool) -> list[str]:
    """Returns the parameters to which a call passes values by position.

    is_bound  whether the call leaves out the first argument of a method, such as `self`
    """
    names = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    has_owner = is_bound and names[:1] in (["self"], ["cls"], ["ctx"])
    return names[1:] if has_owner else names


def iterate_defaults(scope: Any) -> Iterator[tuple[str, ast.expr]]:
    """Yields the parameters of a function that have a default, and the expressions of these."""
    arguments = scope.args
    positional = list_positional_parameters(scope, is_bound=False)
    yield from zip(reversed(positional), reversed(arguments.defaults))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        if default is not None:
            yield argument.arg, default


def find_argument(scope: Any, call: ast.AST | None, name: str, is_bound: bool) -> ast.AST | None:
    """Returns the expression that a call passes for a parameter. If the call unpacks a tuple or
    dict with `*` or `**` that may contain the value, the result is this container as an
    `ast.Starred`.

    is_bound  whether the call leaves out the first argument of a method, such as `self`
    """
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if is_bound and name == "self" and isinstance(call.func, ast.Attribute):
        return call.func.value  # the tensor whose method is called
    positional = list_positional_parameters(scope, is_bound)
    if name in positional:
        position = positional.index(name)
        stars = [isinstance(argument, ast.Starred) for argument in call.args]
        if position < len(call.args) and not any(stars[: position + 1]):
            return call.args[position]
    for keyword in call.keywords:
        if keyword.arg is None:
            return ast.Starred(keyword.value)
    return None


def find_starred_argument(
    scope: Any, call: ast.AST | None, name: str, is_bound: bool
) -> tuple[ast.expr, int] | None:
    """Returns the list that a call passes with `*`, if it contains the value of a parameter, and
    the position of the value in it.
    """
    positional = list_positional_parameters(scope, is_bound)
    if not isinstance(call, ast.Call) or name not in positional:
        return None
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            number = positional.index(name) - position
            return (argument.value, number) if number >= 0 else None
    return None


def read_starred_argument(
    scope: Any, call: ast.AST | None, name: str, is_bound: bool, frame: CallFrame
) -> Any:
    """Returns the value that a call passes for a parameter with `*` or `**`, or UNKNOWN."""
    if not isinstance(call, ast.Call):
        return UNKNOWN
    for keyword in call.keywords:
        container = UNKNOWN if keyword.arg else read_value(keyword.value, frame)
        if isinstance(container, dict) and name in container:
            return container[name]
    positional = list_positional_parameters(scope, is_bound)
    values: list[Any] = []
    for argument in call.args:
        if not isinstance(argument, ast.Starred):
            values.append(read_value(argument, frame))
            continue
        container = read_value(argument.value, frame)
        if not isinstance(container, (list, tuple)):
            break
        values += container
    position = positional.index(name) if name in positional else len(values)
    return values[position] if position < len(values) else UNKNOWN


def is_first_argument(owner: Any, call: ast.AST | None, frame: CallFrame) -> bool:
    """True if a call passes `owner` as its first argument, as `forward(self, x)` does, or
    `forward(*args)` in a decorator.
    """
    if owner is None or not isinstance(call, ast.Call) or not call.args:
        return False
    first = call.args[0]
    if not isinstance(first, ast.Starred):
        return read_value(first, frame) is owner
    container = read_value(first.value, frame)
    return isinstance(container, (list, tuple)) and len(container) > 0 and container[0] is owner


def read_defaults(function: Any) -> dict[str, Any]:
    """Returns the default values of a function's parameters."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return {}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = dict(zip(reversed(names), reversed(function.__defaults__ or ())))
    return {**values, **(function.__kwdefaults__ or {})}


def read_default(scope: Any, name: str) -> Any:
    """Returns the default value of a parameter, if it is a constant."""
    default = dict(iterate_defaults(scope)).get(name)
    return default.value if isinstance(default, ast.Constant) else UNKNOWN


def list_arguments(call: ast.Call) -> list[ast.expr]:
    """Returns the expressions that a call passes by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def iterate_arguments(call: ast.Call) -> Iterator[ast.expr]:
    """Yields the expressions of a call's arguments, with `**` arguments as an `ast.Starred`."""
    yield from call.args
    for keyword in call.keywords:
        yield keyword.value if keyword.arg else ast.Starred(keyword.value)


def has_starred_argument(call: ast.AST | None) -> bool:
    """True if a call unpacks a list with `*` or a dict with `**`."""
    if not isinstance(call, ast.Call):
        return False
    return any(isinstance(part, ast.Starred) for part in iterate_arguments(call))


def find_passed_argument(frame: CallFrame, caller: CallFrame, name: str) -> ast.expr | None:
    """Returns the expression that the call in a caller's frame passes for a parameter. Returns None
    if the function assigns another value to it.
    """
    scope = frame.scope
    if scope is None or isinstance(scope, ast.Module) or name not in list_parameters(scope):
        return None
    if find_earlier_bindings(scope, name, frame.line):
        return None
    is_bound = not is_first_argument(frame.variables.get("self"), caller.expression, caller)
    argument = find_argument(scope, caller.expression, name, is_bound)
    if not isinstance(argument, ast.expr) or isinstance(argument, ast.Starred):
        return None
    return argument
