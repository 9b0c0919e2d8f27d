"""Finds the code that creates a tensor which an object keeps, such as a cache of keys and values."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType

import torch

from .expressions import CREATION_FUNCTIONS, node_keyword
from .frames import CallFrame, make_returned_frame, source_text
from .program_source import ProgramSource


@dataclass(frozen=True, slots=True)
class StorageCreation:
    """The call that creates a tensor, with the wanted dtype if the call has a place for it."""

    text: str
    location: str


def find_storage_creation(
    frames: Sequence[CallFrame], owner: object, name: str, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the call that creates the attribute or buffer `name` of an object. If a parameter of
    the constructor gives the dtype, returns the only call of the constructor, with this parameter.
    """
    for frame, value in _iterate_stored_values(owner, name):
        calls = [
            node
            for node in ast.walk(value)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in CREATION_FUNCTIONS
        ]
        if len(calls) != 1:
            continue
        keyword = node_keyword(calls[0], "dtype")
        location = frame.location_of(calls[0])
        if keyword is None or isinstance(keyword, ast.Attribute):
            return StorageCreation(_with_dtype(calls[0], "dtype", dtype), location)
        arguments = frame.code.co_varnames[: frame.code.co_argcount]
        if isinstance(keyword, ast.Name) and keyword.id in arguments:
            class_name = type(owner).__name__
            constructor = _find_constructor(frames, class_name, keyword.id, dtype)
            if constructor is not None:
                return constructor
        return StorageCreation(source_text(calls[0]), location)
    return None


def _iterate_stored_values(owner: object, name: str) -> Iterator[tuple[CallFrame, ast.expr]]:
    """Yields the expressions that the class of an object assigns to an attribute or registers as a
    buffer, each with a frame for its method.
    """
    methods = [method for kind in type(owner).__mro__[:-1] for method in vars(kind).values()]
    for method in methods:
        frame = None
        if isinstance(method, FunctionType):
            frame = make_returned_frame(method, {"self": owner})
        scope = None if frame is None else frame.scope
        for node in () if scope is None else ast.walk(scope):
            match node:
                case ast.Call(ast.Attribute(_, "register_buffer"), [ast.Constant(key), value, *_]):
                    if key == name and frame is not None:
                        yield frame, value
                case ast.Assign([ast.Attribute(ast.Name("self"), key)], value):
                    if key == name and frame is not None:
                        yield frame, value


def _find_constructor(
    frames: Sequence[CallFrame], class_name: str, parameter: str, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the only call of a class in the user's files, with the wanted dtype."""
    construction = ProgramSource(frames).find_only_call(class_name)
    if construction is None:
        return None
    source, call = construction
    return StorageCreation(_with_dtype(call, parameter, dtype), source.location_of(call))


def _with_dtype(call: ast.Call, parameter: str, dtype: torch.dtype) -> str:
    """Returns the source code of a call with a dtype as one of its keyword arguments."""
    keywords = [keyword for keyword in call.keywords if keyword.arg != parameter]
    keywords.append(ast.keyword(parameter, ast.parse(str(dtype), mode="eval").body))
    return source_text(ast.Call(call.func, call.args, keywords))
