"""Finds the line of the user's code that set the dtype which a cast or a created tensor reads from a
variable: from `x.to(self.precision)` to the argument of the call that made the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...dtypes import to_torch
from ...observe.origin import short_path
from .expressions import node_keyword
from .frames import CallFrame
from .user_files import iterate_user_files

_MAX_STEPS = 12  # assignments and arguments through which a dtype is followed
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Class = ast.ClassDef


@dataclass(frozen=True, slots=True)
class DtypeSetting:
    """The line that set a dtype.

    text       the source code of the call or assignment
    location   the file and line of the expression
    is_default whether the call leaves the argument out, so that its default decides
    fix        the call with another dtype, or the dtype to write into the assignment, and the place
    """

    text: str
    location: str
    is_default: bool
    fix: str

    def describe(self) -> str:
        kind = "is the default of" if self.is_default else "comes from"
        return f"its dtype {kind} `{self.text}` ({self.location})"


@dataclass(frozen=True, slots=True)
class _Place:
    """An expression, the file that contains it, and the definitions around it, outermost first."""

    node: ast.expr
    file: str
    scopes: tuple[_Function | _Class | ast.Lambda, ...]

    @property
    def location(self) -> str:
        return f"{short_path(self.file)}:{self.node.lineno}"


def find_dtype_setting(
    frames: Sequence[CallFrame],
    text: str,
    location: str,
    dtype: torch.dtype,
    wanted_dtype: torch.dtype,
) -> DtypeSetting | None:
    """Returns the line that set the dtype of a cast or creation, if this is another line. Returns
    None if the source code does not show it, or shows several.

    text, location  the source code, file and line of the cast or creation
    dtype           the dtype of its result
    wanted_dtype    the dtype that the rebuilt call asks for
    """
    program = _Program(frames, dtype)
    for place in program.find_calls(text, location):
        node = _read_dtype_expression(place.node)
        if node is not None and _read_dtype(node) is None:
            return program.follow(_Place(node, place.file, place.scopes), wanted_dtype)
    return None


def _read_dtype_expression(call: ast.expr) -> ast.expr | None:
    """Returns the expression of the dtype in `x.to(DTYPE)` and `torch.zeros(8, dtype=DTYPE)`."""
    if not isinstance(call, ast.Call):
        return None
    keyword = node_keyword(call, "dtype")
    if keyword is not None:
        return keyword
    is_cast = isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "type")
    arguments = [part for part in call.args if isinstance(part, (ast.Name, ast.Attribute))]
    return arguments[-1] if is_cast and arguments else None


def _read_dtype(node: ast.expr | None) -> torch.dtype | None:
    """Returns the dtype of an expression such as `torch.float16`."""
    match node:
        case ast.Attribute(ast.Name("torch"), name):
            value = getattr(torch, name, None)
            return value if isinstance(value, torch.dtype) else None
        case ast.Constant(str(name)):
            try:
                return to_torch(name)
            except ValueError:
                return None
    return None


# the place of a call, the call, a parameter, and whether the default of the parameter decides
_Argument = tuple[_Place, ast.Call, str, bool]


class _Program:
    """The expressions of the user's files. `dtype` is the dtype whose setting is searched."""

    def __init__(self, frames: Sequence[CallFrame], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.places: list[_Place] = []
        self.assignments: list[tuple[ast.expr, _Place]] = []
        for file, tree, _ in iterate_user_files(frames):
            self._collect(tree, file, ())

    def _collect(
        self, node: ast.AST, file: str, scopes: tuple[_Function | _Class | ast.Lambda, ...]
    ) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                self.places.append(_Place(child, file, scopes))
            if isinstance(child, ast.Assign):
                for target in child.targets:
                    self.assignments.append((target, _Place(child.value, file, scopes)))
            is_scope = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            self._collect(child, file, (*scopes, child) if is_scope else scopes)  # type: ignore[arg-type]

    def find_calls(self, text: str, location: str) -> Iterator[_Place]:
        for place in self.places:
            if place.location == location and " ".join(ast.unparse(place.node).split()) == text:
                yield place

    def follow(self, place: _Place, wanted_dtype: torch.dtype) -> DtypeSetting | None:
        """Follows an expression of a dtype through assignments and arguments to a constant."""
        last: _Argument | None = None
        assigned = False
        for _ in range(_MAX_STEPS):
            constant = _read_dtype(place.node)
            if constant is not None:
                if constant != self.dtype:
                    return None
                if last is not None and not assigned:
                    call_place, call, name, is_default = last
                    rebuilt = _with_argument(call, place.node, name, wanted_dtype)
                    text = " ".join(ast.unparse(call).split())
                    fix = f"`{rebuilt}` at {call_place.location}"
                    return DtypeSetting(text, call_place.location, is_default, fix)
                text = ast.unparse(place.node)
                fix = f"{wanted_dtype} in place of `{text}` at {place.location}"
                return DtypeSetting(text, place.location, False, fix)
            match place.node:
                case ast.BoolOp(ast.Or(), [first, *_]):
                    place = replace(place, node=first)
                case ast.IfExp(_, body, other):
                    place = replace(place, node=self.choose([body, other]) or body)
                case ast.Subscript(ast.Name(name), ast.Constant(key)):
                    value = self.find_item(place, name, key)
                    if value is None:
                        return None
                    place, assigned = value, True
                case ast.Call(ast.Name("getattr"), [ast.Name("torch"), name_node, *_]):
                    place = replace(place, node=name_node)
                case ast.Attribute(ast.Name(owner), name) if owner != "self":
                    option = self.find_option(name)
                    if option is None:
                        return None
                    place, last, assigned = option
                case ast.Name(name):
                    assignment = self.find_assignment(place, name)
                    argument = None if assignment else self.find_argument(place, name)
                    if assignment is not None:
                        place, assigned = assignment, True
                    elif argument is not None:
                        place, last, assigned = argument[0], argument[1:], False
                    else:
                        return None
                case ast.Attribute(ast.Name("self"), name):
                    attribute = self.find_attribute(place, name)
                    if attribute is None:
                        return None
                    place, assigned = attribute, True
                case _:
                    return None
        return None

    def find_option(self, name: str) -> tuple[_Place, _Argument, bool] | None:
        """Returns the default of the only option `--NAME` that the program adds to a parser of its
        arguments, and the call that adds it.
        """
        options = []
        for place in self.places:
            match place.node:
                case ast.Call(ast.Attribute(_, "add_argument"), arguments) as call:
                    flags = [a.value for a in arguments if isinstance(a, ast.Constant)]
                    default = node_keyword(call, "default")
                    if default is not None and f"--{name}" in map(str, flags):
                        value = replace(place, node=default)
                        options.append((value, (place, call, "default", False), False))
        return options[0] if len(options) == 1 else None

    def choose(self, nodes: Sequence[ast.expr]) -> ast.expr | None:
        """Returns the only expression that is the dtype whose setting is searched."""
        matches = [node for node in nodes if _read_dtype(node) == self.dtype]
        return matches[0] if len(matches) == 1 else None

    def find_item(self, place: _Place, name: str, key: object) -> _Place | None:
        """Returns the value of `NAME[key]`, if a dict is assigned to the name."""
        table = self.find_assignment(place, name)
        if table is None or not isinstance(table.node, ast.Dict):
            return None
        for key_node, value in zip(table.node.keys, table.node.values):
            if isinstance(key_node, ast.Constant) and key_node.value == key:
                return replace(table, node=value)
        return None

    def find_assignment(self, place: _Place, name: str) -> _Place | None:
        """Returns the value that the function around an expression, or a function or module around
        that, assigns to a name before it is read: the only one, or the only one of this dtype.
        """
        for depth in range(len(place.scopes), -1, -1):
            scopes = place.scopes[:depth]
            if depth and isinstance(scopes[-1], ast.ClassDef):
                continue
            values = [
                value
                for target, value in self.assignments
                if isinstance(target, ast.Name) and target.id == name
                if value.file == place.file and value.scopes == scopes
                if value.node.lineno < place.node.lineno or depth < len(place.scopes)
            ]
            values = [value for value in values if value.node is not place.node]
            if len(values) > 1:
                chosen = self.choose([value.node for value in values])
                values = [value for value in values if value.node is chosen]
                return values[0] if values else None
            if values:
                return values[0]
            if depth and name in _parameters(scopes[-1]):
                return None
        return None

    def find_argument(
        self, place: _Place, name: str
    ) -> tuple[_Place, _Place, ast.Call, str, bool] | None:
        """Returns what the only call of the function that has a parameter passes for it: the value,
        the place of the call, the call, the name of the parameter, and whether the default decides.
        """
        for depth in range(len(place.scopes), 0, -1):
            function = place.scopes[depth - 1]
            if isinstance(function, ast.ClassDef) or name not in _parameters(function):
                continue
            assert isinstance(function, _Function)
            calls = list(self.iterate_calls(function, place.scopes[: depth - 1]))
            if len(calls) != 1:
                return None
            call_place = calls[0]
            call = call_place.node
            assert isinstance(call, ast.Call)
            passed = _passed_value(function, call, name)
            if passed is not None:
                value = _Place(passed, call_place.file, call_place.scopes)
                return value, call_place, call, name, False
            default = _default_value(function, name)
            if default is None:
                return None
            return _Place(default, place.file, ()), call_place, call, name, True
        return None

    def iterate_calls(
        self, function: _Function, scopes: tuple[_Function | _Class | ast.Lambda, ...]
    ) -> Iterator[_Place]:
        """Yields the calls of a function. An object's `__init__` is called by its class, and the
        forward of an autograd.Function by `CLASS.apply`.
        """
        owner = scopes[-1].name if scopes and isinstance(scopes[-1], ast.ClassDef) else ""
        for place in self.places:
            assert isinstance(place.node, ast.Call)
            called = ast.unparse(place.node.func)
            names = {called, called.rpartition(".")[2]}
            if function.name == "__init__":
                is_call = owner in names
            elif function.name == "forward" and _parameters(function)[:1] == ["ctx"]:
                is_call = called.endswith(f"{owner}.apply")
            else:
                is_call = function.name in names
            if is_call:
                yield place

    def find_attribute(self, place: _Place, name: str) -> _Place | None:
        """Returns the only value that the class around an expression gives to `self.NAME`, in its
        methods or its body.
        """
        classes = [scope for scope in place.scopes if isinstance(scope, ast.ClassDef)]
        values = [
            value
            for target, value in self.assignments
            if classes and any(scope is classes[-1] for scope in value.scopes)
            if ast.unparse(target) == f"self.{name}"
            or (ast.unparse(target) == name and value.scopes[-1] is classes[-1])
        ]
        return values[0] if len(values) == 1 else None


def _parameters(function: ast.AST) -> list[str]:
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _passed_value(function: _Function, call: ast.Call, name: str) -> ast.expr | None:
    """Returns the expression that a call passes for a parameter."""
    keyword = node_keyword(call, name)
    if keyword is not None:
        return keyword
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if positional[:1] in (["self"], ["cls"], ["ctx"]):
        positional.pop(0)
    position = positional.index(name) if name in positional else len(call.args)
    stars = any(isinstance(argument, ast.Starred) for argument in call.args)
    return call.args[position] if position < len(call.args) and not stars else None


def _default_value(function: _Function, name: str) -> ast.expr | None:
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    defaults: dict[str, ast.expr | None] = dict(
        zip(reversed(positional), reversed(arguments.defaults))
    )
    defaults |= dict(zip([a.arg for a in arguments.kwonlyargs], arguments.kw_defaults))
    return defaults.get(name)


def _with_argument(call: ast.Call, value: ast.expr, name: str, dtype: torch.dtype) -> str:
    """Returns the source code of a call with another dtype in place of a value, or as a keyword if
    the call leaves this argument out.
    """
    wanted = ast.parse(str(dtype), mode="eval").body
    arguments = [wanted if argument is value else argument for argument in call.args]
    keywords = [
        ast.keyword(keyword.arg, wanted if keyword.value is value else keyword.value)
        for keyword in call.keywords
    ]
    is_passed = any(part is value for part in (*call.args, *(k.value for k in call.keywords)))
    if not is_passed:
        keywords.append(ast.keyword(name, wanted))
    return " ".join(ast.unparse(ast.Call(call.func, arguments, keywords)).split())
