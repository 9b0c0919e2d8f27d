"""Continues the search at the assignment of an attribute in the class of its object, and at the
call that made the object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..bindings import find_assigned_call, iterate_attribute_assignments
from ..expressions import UNKNOWN, is_tensor, read_value
from ..frames import make_module_frame, make_returned_frame, source_text
from ..producer import Producer
from .search import Search
from .stored import follow_writes


def follow_field(search: Search, node: ast.Attribute, index: int, line: int) -> Producer:
    """Continues the search at a tensor that an object holds: at the assignment of the attribute
    in the object's class, or else at the call that made the object.
    """
    owner = read_value(node.value, search.frame_at(index, line))
    result = follow_attribute(search, node, node.attr, index, owner)
    # an attribute of a library's object says nothing about the origin of its value
    if result.is_proven and result.kind != "attribute":
        return result
    search.key = node.attr
    result = search.follow(node.value, index, line)
    return result if result.is_proven else search.producer("unknown", node, index)


def follow_attribute(search: Search, node: ast.AST, name: str, index: int, owner: Any) -> Producer:
    """Continues the search at the assignment of `self.NAME` in a method of the owner's class."""
    is_unpacked = isinstance(read_value(node, search.frames[index]), (tuple, list))
    creations = []
    for binding, new_index in iterate_attribute_bindings(search, name, index, owner):
        search.element = search.key if is_unpacked and isinstance(search.key, int) else None
        result = search.follow(binding.value, new_index, binding.lineno)
        if result.is_proven:
            return result
        if result.kind == "creation" and result.text in source_text(binding.value):
            creations.append(result)
    is_stored = isinstance(read_value(node, search.frames[index]), torch.Tensor)
    if is_stored and len(creations) == 1:
        return replace(creations[0], is_proven=True)  # the only call that makes the tensor
    written = follow_writes(search, name, owner)
    if written is not None:
        return written
    return search.producer("attribute", node, index, is_proven=is_stored)


def iterate_attribute_bindings(
    search: Search, name: str, index: int, owner: Any
) -> Iterator[tuple[ast.Assign, int]]:
    """Yields the assignments `self.NAME = ...` in the methods of the owner's class, each with
    the index of a frame for the method.
    """
    methods = [method for kind in type(owner).__mro__[:-1] for method in vars(kind).values()]
    for method in methods:
        frame = None
        if isinstance(method, FunctionType):
            frame = make_returned_frame(method, {"self": owner})
        if frame is None:
            continue
        for binding in iterate_attribute_assignments(frame.scope, name):
            new_index = len(search.frames)
            search.frames.append(frame)
            search.callers[new_index] = (index, None, search.frames[index].line)
            is_constructor = method is vars(type(owner)).get("__init__")
            construction = find_only_construction(search, owner) if is_constructor else None
            if construction is not None:
                search.callers[new_index] = construction
            yield binding, new_index


def find_only_construction(search: Search, owner: object) -> tuple[int, ast.Call, int] | None:
    """Returns the only call in the user's files that makes objects of a class: the index of a
    frame for the function that contains it, the call, and its line.
    """
    construction = search.program.find_only_call(type(owner).__name__)
    if construction is None:
        return None
    source, call = construction
    index = search.add_function_frame(call, source)
    return None if index is None else (index, call, call.lineno)


def find_constructors(search: Search, module: object, index: int) -> Iterator[tuple[ast.Call, int]]:
    """Yields the calls that were assigned to a variable, or to an attribute of `self`, whose
    value is this module or dataset. Each call comes with the index of its frame.
    """
    frame = search.frames[index]
    for name in [name for name, value in frame.variables.items() if value is module]:
        call = find_assigned_call(ast.Name(name, ast.Load()), frame)
        if call is not None:
            yield call, index
    for name in [name for name, value in frame.global_variables.items() if value is module]:
        module_frame = make_module_frame(frame)
        if module_frame is not None:
            call = find_assigned_call(ast.Name(name, ast.Load()), module_frame)
            search.frames.append(module_frame)
            if call is not None:
                yield call, len(search.frames) - 1
    owner = frame.variables.get("self")
    stored = owner._modules if isinstance(owner, nn.Module) else {}
    stored = {**getattr(owner, "__dict__", {}), **stored}
    for name in [name for name, value in stored.items() if value is module]:
        for binding, binding_index in iterate_attribute_bindings(search, name, index, owner):
            if isinstance(binding.value, ast.Call):
                yield binding.value, binding_index


def follow_constructor(search: Search, argument: ast.expr, index: int) -> Producer:
    """Continues the search at an argument of the call that created a module."""
    result = search.follow(argument, index, argument.lineno)
    location = search.frames[index].location_of(argument)
    return replace(result, passed=source_text(argument), passed_at=location)


def may_hold_tensor(value: Any) -> bool:
    return is_tensor(value) or value is UNKNOWN or isinstance(value, (tuple, list, dict))
