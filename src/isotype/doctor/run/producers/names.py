"""Continues the search at the assignment of a name: the last one before the line, one of an earlier
pass of a loop, or one of a global variable.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from ..arguments import find_argument, is_first_argument, list_parameters
from ..bindings import (
    assigns_item,
    collect_bound_names,
    find_appended,
    find_assigned_expression,
    find_earlier_bindings,
    find_position,
    is_name,
    read_end_line,
    read_last_line,
    walk_bindings,
    walk_scope,
)
from ..casts import read_cast_dtype
from ..expressions import UNKNOWN, is_tensor, read_value
from ..frames import CallFrame, make_module_frame
from ..producer import Producer
from .calls import follow_call
from .comprehensions import follow_comprehension_name
from .functions import follow_item
from .items import follow_loop
from .modules import follow_previous_layer
from .passed import follow_argument
from .promotions import follow_widest
from .search import Search


def follow_name(search: Search, node: ast.AST, name: str, index: int, line: int) -> Producer:
    frame = search.frame_at(index, line)
    scope = frame.scope
    inner = follow_comprehension_name(search, node, name, index)
    if inner is not None:
        return inner
    if scope is None or (index, name) in search.earlier_names:
        return search.producer("unknown", node, index)
    if line == frame.line:
        result = follow_previous_layer(search, index)
        if result is not None:
            return result
    item = follow_written_item(search, scope, name, index, line)
    if item is not None:
        return item
    if is_unchanged_argument(search, scope, name, index):
        return follow_argument(search, scope, name, node, index)
    assigned = follow_earlier_bindings(search, scope, name, index, line)
    if assigned is not None:
        return assigned
    if isinstance(scope, ast.Module):
        return search.producer("unknown", node, index)
    if name in list_parameters(scope):
        return follow_argument(search, scope, name, node, index)
    if name not in frame.variables and name in frame.global_variables:
        return follow_global(search, node, name, frame)
    return search.producer("unknown", node, index)


def follow_written_item(
    search: Search, scope: Any, name: str, index: int, line: int
) -> Producer | None:
    """Continues the search at the last `NAME[key] = value` with the wanted key, or at the only
    `NAME.append(value)`.
    """
    item = find_assigned_item(search, scope, name, index, line)
    if item is not None:
        return follow_item(search, item.value, index, item.lineno)
    appended = find_appended(scope, name, line)
    if appended is None:
        return None
    search.key = UNKNOWN
    return search.follow(appended, index, appended.lineno)


def follow_earlier_bindings(
    search: Search, scope: Any, name: str, index: int, line: int
) -> Producer | None:
    """Continues the search at the last assignment before a line that ran. Returns None if no
    assignment is certain to have run.
    """
    frame = search.frame_at(index, line)
    for binding in find_earlier_bindings(scope, name, line):
        if search.is_skipped(binding, scope, index):
            continue
        if has_other_dtype(search, binding, name, index):
            continue  # in a branch that did not run
        result = follow_binding(search, binding, name, index)
        file, _, result_line = result.location.rpartition(":")
        is_here = file == frame.location.rpartition(":")[0]
        is_here = is_here and binding.lineno <= int(result_line) <= read_end_line(binding)
        is_certain = frame.is_user_code or not is_here
        is_certain = is_certain or not search.is_conditional(binding, scope, index, line)
        if result.is_proven and is_certain:
            return result
        if is_certain:
            return follow_earlier_pass(search, scope, name, index, line) or result
    return follow_earlier_pass(search, scope, name, index, line)


def follow_earlier_pass(
    search: Search, scope: Any, name: str, index: int, line: int
) -> Producer | None:
    """Continues the search at an assignment later in the body of the same loop, which gave the
    name its value in the pass before. Returns None if this does not prove the dtype.
    """
    loops = [
        node
        for node in walk_scope(scope)
        if isinstance(node, (ast.For, ast.While)) and node.lineno < line <= read_end_line(node)
    ]
    for loop in reversed(loops):
        for binding in walk_bindings(loop):
            if binding.lineno <= line or name not in collect_bound_names(binding):
                continue
            if search.is_skipped(binding, scope, index):
                continue
            if has_other_dtype(search, binding, name, index):
                continue
            search.earlier_names.add((index, name))
            result = follow_binding(search, binding, name, index)
            search.earlier_names.remove((index, name))
            if result.is_proven:
                return result
    return None


def find_assigned_item(
    search: Search, scope: Any, name: str, index: int, line: int
) -> ast.Assign | None:
    """Returns the last assignment `NAME[key] = value` before a line with the wanted key."""
    if not isinstance(search.key, str):
        return None
    assignments = [
        node
        for node in walk_scope(scope)
        if isinstance(node, ast.Assign)
        and read_last_line(node) < line
        and assigns_item(node, name, search.key)
    ]
    for node in sorted(assignments, key=lambda node: node.lineno, reverse=True):
        value = read_value(node.value, search.frame_at(index, node.lineno))
        is_other = is_tensor(value) and value.dtype != search.dtype
        if not is_other and not search.is_skipped(node, scope, index):
            return node
    return None


def is_unchanged_argument(search: Search, scope: Any, name: str, index: int) -> bool:
    """True if a parameter of a running function still holds the object that the caller passed.
    Assignments to the parameter are then in branches that did not run.
    """
    value = search.frames[index].variables.get(name)
    is_container = isinstance(value, (torch.Tensor, tuple, list, dict))
    if index >= search.running_count or not is_container or isinstance(scope, ast.Module):
        return False
    outer, call, _ = search.find_caller(index)
    if outer < 0 or name not in list_parameters(scope):
        return False
    owner = search.frames[index].variables.get("self")
    is_bound = not is_first_argument(owner, call, search.frames[outer])
    argument = find_argument(scope, call, name, is_bound)
    if argument is None or isinstance(argument, ast.Starred):
        return False
    return read_value(argument, search.frames[outer]) is value


def follow_global(search: Search, node: ast.AST, name: str, frame: CallFrame) -> Producer:
    """Continues the search at the assignment of a global variable."""
    for index, other in enumerate(search.frames):
        if isinstance(other.scope, ast.Module) and other.file == frame.file:
            return follow_name(search, node, name, index, other.line)
    module_frame = make_module_frame(frame)
    index = len(search.frames)
    if module_frame is None:
        return search.producer("unknown", node, index - 1)
    search.frames.append(module_frame)
    return follow_name(search, node, name, index, module_frame.line)


def has_other_dtype(search: Search, binding: Any, name: str, index: int) -> bool:
    """True if the assigned value has another dtype than the tensor."""
    if not isinstance(binding, ast.Assign):
        return False
    assigned = find_assigned_expression(binding, name)
    frame = search.frame_at(index, binding.lineno)
    if isinstance(assigned, ast.Call):
        dtype = read_cast_dtype(assigned, frame)
        if dtype is not None:
            return dtype != search.dtype
    value = read_value(assigned, frame)
    return is_tensor(value) and value.dtype != search.dtype


def follow_binding(search: Search, binding: Any, name: str, index: int) -> Producer:
    match binding:
        case ast.For() | ast.AsyncFor():
            return follow_loop(search, binding, name, index)
        case ast.AugAssign():
            return follow_widest(search, [binding.value], binding.value, index, binding.lineno)
        case ast.AnnAssign(value=ast.expr() as value):
            return search.follow(value, index, binding.lineno)
    return follow_assignment(search, binding, name, index)


def follow_assignment(search: Search, binding: ast.Assign, name: str, index: int) -> Producer:
    value = find_assigned_expression(binding, name)
    if value is None:
        search.key = find_position(binding.targets[0], name)
        result = search.follow(binding.value, index, binding.lineno)
        return result if result.is_proven else search.producer("call", binding.value, index)
    if isinstance(value, ast.Call):
        search.element = find_position(binding.targets[0], name)
        result = follow_call(search, value, index, binding.lineno)
        search.element = None
        return result
    if isinstance(value, ast.BinOp):
        # the name may stand on both sides, as in `x = x + table`
        operands = [value.left, value.right]
        operands.sort(key=lambda operand: is_name(operand, name))
        return follow_widest(search, operands, value, index, binding.lineno)
    return search.follow(value, index, binding.lineno)
