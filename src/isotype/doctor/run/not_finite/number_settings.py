"""Finds the line of the program that sets a number, such as an eps that a layer gets from a field of
a configuration.

The line that uses the number names a variable. Its name is followed through the assignments,
arguments, defaults and fields of the program to a literal with the same value. If several lines fit,
none is named.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ....observe.origin import Site
from ..arguments import iterate_defaults, list_positional_parameters
from ..frames import make_file_frame
from ..program_source import Definition, Function, ProgramSource
from .lost_numbers import compute_number

_MAX_NAMES = 12  # names through which a number is followed
# the functions and classes around a node, outermost first
_Scopes = tuple[Definition, ...]
# name -> the functions of this name, each with the functions around it
_Functions = dict[str, list[tuple[Function, _Scopes]]]


@dataclass(frozen=True, slots=True)
class NumberSetting:
    """A line that sets a number.

    text        the code that sets it, such as `norm_eps: float = 1e-8`
    is_default  whether it is the default of a parameter, which a call can replace
    """

    text: str
    location: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class _Binding:
    """An expression that the program gives to a name."""

    value: ast.expr
    text: str
    location: str
    is_default: bool = False


def find_number_setting(expression: str, value: float, site: Site | None) -> NumberSetting | None:
    """Returns the line that sets the number which an expression such as `self.eps` or `1 - limit`
    contains. Returns None if the line itself contains the number.
    """
    node = _parse(expression)
    name = _read_name(node)
    if site is None or not name:
        return None
    bindings = _collect_bindings(site.file)
    pending = [name]
    names: set[str] = set()
    settings: dict[str, NumberSetting] = {}
    while pending and len(names) < _MAX_NAMES:
        current = pending.pop()
        names.add(current)
        for binding in bindings.get(current, ()):
            for choice in _list_choices(binding.value):
                if _evaluate(node, _evaluate(choice, None)) == value:
                    setting = NumberSetting(binding.text, binding.location, binding.is_default)
                    settings[binding.location] = setting
                elif (alias := _read_name(choice)) and alias not in names:
                    pending.append(alias)
    passed = [setting for setting in settings.values() if not setting.is_default]
    chosen = passed or list(settings.values())
    return chosen[0] if len(chosen) == 1 else None


def _parse(expression: str) -> ast.expr | None:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None


def _read_name(node: ast.expr | None) -> str:
    """Returns the name of the only variable in an expression: `eps` for `1 - self.eps` and for
    `config["eps"]`.
    """
    match node:
        case ast.Name(name) | ast.Attribute(_, name) | ast.Subscript(_, ast.Constant(str(name))):
            return name
        case ast.BinOp(left, _, right):
            names = [name for name in (_read_name(left), _read_name(right)) if name]
            return names[0] if len(names) == 1 else ""
        case ast.UnaryOp(ast.USub(), operand):
            return _read_name(operand)
    return ""


def _list_choices(node: ast.expr) -> list[ast.expr]:
    """Lists the expressions of which a condition chooses one."""
    match node:
        case ast.IfExp(_, body, other):
            return [*_list_choices(body), *_list_choices(other)]
        case ast.BoolOp(_, values):
            return [choice for value in values for choice in _list_choices(value)]
    return [node]


def _evaluate(node: ast.expr | None, variable: float | None) -> float | None:
    """Returns the value of an expression of numbers and one variable."""
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return variable
        case ast.Call(ast.Name("float"), [argument]):
            return _evaluate(argument, variable)
        case ast.UnaryOp(ast.USub(), operand):
            value = _evaluate(operand, variable)
            return None if value is None else -value
        case ast.BinOp(left, operator, right):
            return compute_number(operator, _evaluate(left, variable), _evaluate(right, variable))
    return None


def _collect_bindings(file: str) -> dict[str, list[_Binding]]:
    """Collects what the program gives to names, in the user's files that the main program and a file
    import.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    frames = [make_file_frame(path, {}) for path in dict.fromkeys((file, main or file))]
    nodes = [
        (source, node, source.list_definitions(node))
        for source in ProgramSource(frames).files
        for node in source.nodes
    ]
    functions: _Functions = {}
    for _, node, scopes in nodes:
        _add_function(node, scopes, functions)
    bindings: dict[str, list[_Binding]] = {}
    for source, node, scopes in nodes:
        for name, value, text, is_default in _iterate_values(node, scopes, functions):
            location = source.location_of(value)
            bindings.setdefault(name, []).append(_Binding(value, text, location, is_default))
    return bindings


def _add_function(node: ast.AST, scopes: _Scopes, functions: _Functions) -> None:
    """Stores a function under the name with which it is called: `__init__` under its class."""
    if isinstance(node, ast.ClassDef):
        functions.setdefault(node.name, [])  # a dataclass has no `__init__`
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    name = node.name
    if name == "__init__" and scopes and isinstance(scopes[-1], ast.ClassDef):
        name = scopes[-1].name
    outer = tuple(scope for scope in scopes if not isinstance(scope, ast.ClassDef))
    functions.setdefault(name, []).append((node, outer))


def _find_functions(name: str, scopes: _Scopes, functions: _Functions) -> list[Function]:
    """Returns the functions of a name that code inside these functions and classes sees: those of
    the innermost function around it that has one.
    """
    visible = [
        (len(outer), function)
        for function, outer in functions.get(name, ())
        if all(any(scope is other for other in scopes) for scope in outer)
    ]
    innermost = max((depth for depth, _ in visible), default=0)
    return [function for depth, function in visible if depth == innermost]


def _iterate_values(
    node: ast.AST, scopes: _Scopes, functions: _Functions
) -> Iterator[tuple[str, ast.expr, str, bool]]:
    """Yields (name, value, code, is_default) of everything to which a node gives a value."""
    match node:
        case ast.Assign(targets, value):
            for target in targets:
                yield _target_name(target), value, ast.unparse(node), False
        case ast.AnnAssign(target, _, ast.expr() as value):
            yield _target_name(target), value, ast.unparse(node), False
        case ast.Dict(keys, values):
            for key, value in zip(keys, values):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value, f"{ast.unparse(key)}: {ast.unparse(value)}", False
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for name, value in iterate_defaults(node):
                yield name, value, f"def {node.name}(..., {name}={ast.unparse(value)})", True
        case ast.Call():
            for name, value in _iterate_arguments(node, scopes, functions):
                code = f"{ast.unparse(node.func)}(..., {name}={ast.unparse(value)})"
                yield name, value, code, False


def _target_name(target: ast.expr) -> str:
    return _read_name(target) if not isinstance(target, ast.BinOp) else ""


def _iterate_arguments(
    call: ast.Call, scopes: _Scopes, functions: _Functions
) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names and values that a call passes: to a function or class of the program, or as
    the default of an option of the command line. Arguments of libraries are left out.
    """
    name = _read_name(call.func)
    if name == "add_argument":
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        defaults = [keyword.value for keyword in call.keywords if keyword.arg == "default"]
        for flag in map(str, flags):
            if defaults:
                yield flag.lstrip("-").replace("-", "_"), defaults[0]
        return
    if name in functions:
        yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)
    for function in _find_functions(name, scopes, functions):
        yield from zip(list_positional_parameters(function, is_bound=True), call.args)
