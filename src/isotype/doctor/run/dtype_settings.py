"""Finds the line of the user's code that set the dtype which a cast or a created tensor reads from a
variable: from `x.to(self.precision)` to the argument of the call that made the object.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...dtypes import to_torch
from ...observe.origin import short_path
from .arguments import find_argument, has_starred_argument, iterate_defaults, list_parameters
from .bindings import is_name
from .expressions import node_keyword
from .frames import CallFrame, source_text
from .program_source import Definition, ProgramSource, SourceFile, read_called_name

_MAX_STEPS = 12  # assignments and arguments through which a dtype is followed


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
    scopes: tuple[Definition, ...]

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
    search = _DtypeSearch(frames, dtype)
    for place in search.find_calls(text, location):
        node = _read_dtype_expression(place.node)
        if node is not None and _read_dtype(node) is None:
            return search.follow(_Place(node, place.file, place.scopes), wanted_dtype)
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


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a call.

    place       the place of the call
    name        the parameter
    is_default  whether the call leaves the argument out, so that its default decides
    """

    place: _Place
    call: ast.Call
    name: str
    is_default: bool


class _DtypeSearch:
    """A search for the line that set a dtype, in the source code of the user's program."""

    def __init__(self, frames: Sequence[CallFrame], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.program = ProgramSource(frames)

    def find_calls(self, text: str, location: str) -> Iterator[_Place]:
        for source in self.program.files:
            for node in source.nodes:
                if not isinstance(node, ast.Call) or source.location_of(node) != location:
                    continue
                if source_text(node) == text:
                    yield _make_place(source, node)

    def follow(self, place: _Place, wanted_dtype: torch.dtype) -> DtypeSetting | None:
        """Follows an expression of a dtype through assignments and arguments to a constant."""
        argument: _Argument | None = None
        for _ in range(_MAX_STEPS):
            place = self.choose_part(place)
            constant = _read_dtype(place.node)
            if constant is not None:
                is_wanted = constant == self.dtype
                return _make_setting(place, argument, wanted_dtype) if is_wanted else None
            origin = self.find_origin(place)
            if origin is None:
                return None
            place, argument = origin
        return None

    def choose_part(self, place: _Place) -> _Place:
        """Returns the part of an expression such as `dtype or torch.float16` that gave the dtype."""
        match place.node:
            case ast.BoolOp(ast.Or(), [first, *_]):
                return self.choose_part(replace(place, node=first))
            case ast.IfExp(_, body, other):
                return self.choose_part(replace(place, node=self.choose([body, other]) or body))
            case ast.Call(ast.Name("getattr"), [ast.Name("torch"), name, *_]):
                return self.choose_part(replace(place, node=name))
        return place

    def find_origin(self, place: _Place) -> tuple[_Place, _Argument | None] | None:
        """Returns the expression that gave a variable, an attribute or an item its value. If a call
        passes it as an argument, also returns the call.
        """
        match place.node:
            case ast.Name(name):
                assignment = self.find_assignment(place, name)
                if assignment is not None:
                    return assignment, None
                return self.find_argument(place, name)
            case ast.Attribute(ast.Name("self"), name):
                attribute = self.find_attribute(place, name)
                return None if attribute is None else (attribute, None)
            case ast.Attribute(owner, name):
                field = self.find_field(replace(place, node=owner), name)
                return field or self.find_option(name)
            case ast.Subscript(ast.Name(name), ast.Constant(key)):
                item = self.find_item(place, name, key)
                return None if item is None else (item, None)
        return None

    def find_field(self, place: _Place, name: str) -> tuple[_Place, _Argument | None] | None:
        """Returns the value that an object's field got where a call of its class made the object: an
        argument of this call, or the default of the class.

        place  the expression of the object, such as `config` or `self.config`
        """
        for _ in range(_MAX_STEPS):
            if isinstance(place.node, ast.Call):
                break
            origin = self.find_origin(place)
            if origin is None:
                return None
            place = origin[0]
        call = place.node
        if not isinstance(call, ast.Call) or not _makes_object(call):
            return None
        if any(_is_field(target, name) for target, _ in self.iterate_assignments()):
            return None  # the program changes the field later
        passed = node_keyword(call, name)
        if passed is not None:
            argument = _Argument(place, call, name, is_default=False)
            return replace(place, node=passed), argument
        default = self.find_class_default(call, name)
        return None if default is None else (default, _Argument(place, call, name, is_default=True))

    def find_class_default(self, call: ast.Call, name: str) -> _Place | None:
        """Returns the default of a field of a dataclass of the program, which a call leaves out."""
        for source in self.program.files:
            for node in source.nodes:
                if not isinstance(node, ast.ClassDef) or not is_name(call.func, node.name):
                    continue
                for field in node.body:
                    match field:
                        case ast.AnnAssign(ast.Name(field_name), _, ast.expr() as value):
                            is_left_out = not call.args and not has_starred_argument(call)
                            if field_name == name and is_left_out:
                                return _make_place(source, value)
        return None

    def find_option(self, name: str) -> tuple[_Place, _Argument] | None:
        """Returns the default of the only option `--NAME` that the program adds to a parser of its
        arguments, and the call that adds it.
        """
        options = []
        for source, call in self.program.list_calls("add_argument"):
            flags = [part.value for part in call.args if isinstance(part, ast.Constant)]
            default = node_keyword(call, "default")
            if default is not None and f"--{name}" in map(str, flags):
                place = _make_place(source, call)
                argument = _Argument(place, call, "default", is_default=False)
                options.append((replace(place, node=default), argument))
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
                for target, value in self.iterate_assignments()
                if is_name(target, name)
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
            if depth and name in _list_parameters(scopes[-1]):
                return None
        return None

    def find_argument(self, place: _Place, name: str) -> tuple[_Place, _Argument] | None:
        """Returns the value that the only call of a function passes for a parameter, or the default
        of the parameter, and the call.
        """
        for depth in range(len(place.scopes), 0, -1):
            function = place.scopes[depth - 1]
            if isinstance(function, ast.ClassDef) or name not in list_parameters(function):
                continue
            calls = self.program.list_function_calls(function, place.scopes[: depth - 1])
            if len(calls) != 1:
                return None
            source, call = calls[0]
            call_place = _make_place(source, call)
            passed = find_argument(function, call, name, is_bound=True)
            if isinstance(passed, ast.expr) and not isinstance(passed, ast.Starred):
                value = _Place(passed, call_place.file, call_place.scopes)
                return value, _Argument(call_place, call, name, is_default=False)
            default = dict(iterate_defaults(function)).get(name)
            if default is None or has_starred_argument(call):
                return None
            argument = _Argument(call_place, call, name, is_default=True)
            return _Place(default, place.file, ()), argument
        return None

    def iterate_assignments(self) -> Iterator[tuple[ast.expr, _Place]]:
        """Yields the targets of the assignments of the program, each with the place of its value."""
        for source, assignment in self.program.list_assignments():
            for target in assignment.targets:
                yield target, _make_place(source, assignment.value)

    def find_attribute(self, place: _Place, name: str) -> _Place | None:
        """Returns the only value that the class around an expression gives to `self.NAME`, in its
        methods or its body.
        """
        classes = [scope for scope in place.scopes if isinstance(scope, ast.ClassDef)]
        values = [
            value
            for target, value in self.iterate_assignments()
            if classes and any(scope is classes[-1] for scope in value.scopes)
            if ast.unparse(target) == f"self.{name}"
            or (ast.unparse(target) == name and value.scopes[-1] is classes[-1])
        ]
        return values[0] if len(values) == 1 else None


def _make_place(source: SourceFile, node: ast.expr) -> _Place:
    return _Place(node, source.file, source.list_definitions(node))


def _makes_object(call: ast.Call) -> bool:
    """True for a call of a class, or of a function of torch, such as `torch.zeros`."""
    return read_called_name(call)[:1].isupper() or ast.unparse(call.func).startswith("torch.")


def _is_field(target: ast.expr, name: str) -> bool:
    """True for the target `config.NAME` of an assignment. `self.NAME` is an attribute of a class."""
    return (
        isinstance(target, ast.Attribute)
        and target.attr == name
        and ast.unparse(target.value) != "self"
    )


def _list_parameters(definition: Definition) -> list[str]:
    return [] if isinstance(definition, ast.ClassDef) else list_parameters(definition)


def _make_setting(
    place: _Place, argument: _Argument | None, wanted_dtype: torch.dtype
) -> DtypeSetting:
    """Describes the constant at a place. An argument of a call is changed in the call."""
    if argument is None:
        text = ast.unparse(place.node)
        fix = f"{wanted_dtype} in place of `{text}` at {place.location}"
        return DtypeSetting(text, place.location, False, fix)
    rebuilt = _with_argument(argument.call, place.node, argument.name, wanted_dtype)
    location = argument.place.location
    fix = f"`{rebuilt}` at {location}"
    return DtypeSetting(source_text(argument.call), location, argument.is_default, fix)


def _with_argument(call: ast.Call, value: ast.expr, name: str, dtype: torch.dtype) -> str:
    """Returns the source code of a call with another dtype in place of a value, or as a keyword if
    the call leaves this argument out.
    """
    wanted = ast.parse(str(dtype), mode="eval").body
    rebuilt = copy.deepcopy(call, {id(value): wanted})
    if all(part is not value for part in ast.walk(call)):
        rebuilt.keywords.append(ast.keyword(name, wanted))
    return source_text(rebuilt)
