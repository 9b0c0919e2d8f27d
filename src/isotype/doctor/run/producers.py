"""Finds the expression that gave a tensor its dtype. The search starts at the line that failed and
goes backward through the source code. From a name, the search goes to its assignment. From a call
that keeps the dtype, it goes to the operand, and from a parameter to the argument that the caller
passed.

Variables are read with the values that they had at the failure. The search continues at an
expression only if its value has the same dtype as the tensor, or if the value cannot be read.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .expressions import (
    CREATION_FUNCTIONS,
    UNKNOWN,
    TensorFacts,
    is_tensor,
    read_condition,
    read_value,
)
from .frames import CallFrame
from .modules import ModelNames

_MAX_STEPS = 24


@dataclass(frozen=True, slots=True)
class Producer:
    """The expression that gave a tensor its dtype.

    kind      cast, module, creation, parameter, data, call or unknown
    text      the source code of the expression
    location  the file and line of the expression
    function  the function that contains the line
    path      the module, parameter or buffer that the expression names; "" if it names none
    module    the module that computed the tensor, for the kind `module`
    passed    the expression that the innermost frame of the user's code passes to another function
              as this tensor; "" if there is none
    passed_at the file and line of that expression
    """

    kind: str
    text: str
    location: str
    function: str
    path: str = ""
    module: nn.Module | None = None
    passed: str = ""
    passed_at: str = ""


def find_producer(
    node: ast.AST, frames: Sequence[CallFrame], index: int, dtype: torch.dtype, names: ModelNames
) -> Producer:
    """Finds the expression that gave the value of `node` the dtype `dtype`. `node` is an expression
    in the frame with the number `index`, and the search starts there.
    """
    return _Search(frames, dtype, names).follow(node, index)


def find_assigned_call(node: ast.AST, frame: CallFrame) -> ast.Call | None:
    """Returns the call whose result was last assigned to a name before the running line."""
    scope = frame.scope
    if scope is None or not isinstance(node, ast.Name):
        return None
    for binding in _earlier_bindings(scope, node.id, frame.line):
        if isinstance(binding, ast.Assign) and isinstance(binding.value, ast.Call):
            return binding.value
    return None


class _Search:
    """Searches the code for the expression that gave a tensor its dtype."""

    def __init__(self, frames: Sequence[CallFrame], dtype: torch.dtype, names: ModelNames) -> None:
        self.frames = frames
        self.dtype = dtype
        self.names = names
        self.step_count = 0
        self.passed: ast.AST | None = None
        self.passed_at = ""

    def follow(self, node: ast.AST, index: int, line: int | None = None) -> Producer:
        """`line` is the line at which the expression was evaluated. The default is the running
        line.
        """
        frame = self.frames[index]
        if line is None:
            line = frame.line
        self.step_count += 1
        if self.passed is None and frame.is_user_code:
            self.passed = node
            self.passed_at = frame.location
        value = read_value(node, frame)
        has_other_dtype = is_tensor(value) and value.dtype != self.dtype
        if self.step_count > _MAX_STEPS or has_other_dtype:
            return self.producer("unknown", node, index)
        path = self.names.tensor_path(value)
        if path is not None:
            return self.producer("parameter", node, index, path=path)
        match node:
            case ast.Name(name):
                return self.follow_name(node, name, index, line)
            case ast.Subscript(container, _):
                return self.follow(container, index, line)
            case ast.BinOp(left, _, right):
                return self.follow_widest([left, right], node, index, line)
            case ast.UnaryOp(_, operand):
                return self.follow(operand, index, line)
            case ast.IfExp(_, body, _):
                return self.follow(body, index, line)
            case ast.Call():
                return self.follow_call(node, index, line)
        return self.producer("unknown", node, index)

    def producer(
        self,
        kind: str,
        node: ast.AST,
        index: int,
        *,
        path: str = "",
        module: nn.Module | None = None,
    ) -> Producer:
        frame = self.frames[index]
        return Producer(
            kind,
            _source(node),
            frame.location_of(node),
            frame.function,
            path,
            module,
            "" if self.passed is None else _source(self.passed),
            self.passed_at,
        )

    def follow_widest(
        self, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
    ) -> Producer:
        """Continues the search at the first operand that has the wanted dtype. If no operand has
        it, the search continues at the first operand whose value cannot be read. If there is no
        such operand either, the operation itself gave its result the dtype.
        """
        for operand in nodes:
            value = read_value(operand, self.frames[index])
            if is_tensor(value) and value.dtype == self.dtype:
                return self.follow(operand, index, line)
        for operand in nodes:
            if isinstance(operand, (ast.Call, ast.BinOp, ast.Name)):
                value = read_value(operand, self.frames[index])
                if value is UNKNOWN:
                    return self.follow(operand, index, line)
        return self.producer("call", node, index)

    def follow_call(self, node: ast.Call, index: int, line: int) -> Producer:
        frame = self.frames[index]
        function = read_value(node.func, frame)
        if isinstance(function, nn.Module):
            path = self.names.module_path(function)
            return self.producer("module", node, index, path=path, module=function)
        if isinstance(node.func, ast.Attribute):
            owner = read_value(node.func.value, frame)
            result = read_value(node, frame)
            if is_tensor(owner) and isinstance(result, TensorFacts):
                if owner.dtype == result.dtype:
                    return self.follow(node.func.value, index, line)
                return self.producer("cast", node, index)
            if node.func.attr in ("float", "half", "bfloat16", "double", "to"):
                return self.producer("cast", node, index)
            if owner is torch and node.func.attr in CREATION_FUNCTIONS:
                return self.producer("creation", node, index)
        is_torch_function = getattr(function, "__module__", "").startswith("torch") or isinstance(
            function, type(torch.add)
        )
        if is_torch_function and node.args:
            operands = list(node.args)
            if isinstance(operands[0], (ast.List, ast.Tuple)):
                operands = list(operands[0].elts)
            return self.follow_widest(operands, node, index, line)
        if node.args and not frame.is_user_code:
            # a helper of a library: its first argument, if it has the dtype
            value = read_value(node.args[0], frame)
            if is_tensor(value) and value.dtype == self.dtype:
                return self.follow(node.args[0], index, line)
        return self.producer("call", node, index)

    def follow_name(self, node: ast.AST, name: str, index: int, line: int) -> Producer:
        frame = self.frames[index]
        scope = frame.scope
        if scope is None:
            return self.producer("unknown", node, index)
        for binding in _earlier_bindings(scope, name, line):
            if _is_skipped(binding, scope, frame) or self.has_other_dtype(binding, name, frame):
                continue  # in a branch that did not run
            return self.follow_binding(binding, name, index)
        if not isinstance(scope, ast.Module) and name in _parameter_names(scope):
            return self.follow_argument(scope, name, node, index)
        return self.producer("unknown", node, index)

    def has_other_dtype(self, binding: Any, name: str, frame: CallFrame) -> bool:
        """True if the assigned value has another dtype than `self.dtype`."""
        if not isinstance(binding, ast.Assign):
            return False
        assigned = _assigned_expression(binding, name)
        value = read_value(assigned, frame)
        return is_tensor(value) and value.dtype != self.dtype

    def follow_binding(self, binding: Any, name: str, index: int) -> Producer:
        match binding:
            case ast.For() | ast.AsyncFor():
                return self.producer("data", binding.iter, index)
            case ast.AugAssign():
                return self.follow_widest([binding.value], binding.value, index, binding.lineno)
            case ast.AnnAssign(value=ast.expr() as value):
                return self.follow(value, index, binding.lineno)
        return self.follow_assignment(binding, name, index)

    def follow_assignment(self, binding: ast.Assign, name: str, index: int) -> Producer:
        value = _assigned_expression(binding, name)
        if value is None:
            return self.producer("call", binding.value, index)
        # the name may stand on both sides: its value at the failure is that of the left side
        if isinstance(value, ast.Call):
            return self.follow_call(value, index, binding.lineno)
        if isinstance(value, ast.BinOp):
            operands = [value.left, value.right]
            others = [operand for operand in operands if not _is_name(operand, name)]
            return self.follow_widest(others, value, index, binding.lineno)
        return self.follow(value, index, binding.lineno)

    def follow_argument(self, scope: ast.AST, name: str, node: ast.AST, index: int) -> Producer:
        """If the search has reached a parameter of a function, continues it at the argument that
        the caller passed for this parameter.
        """
        outer = index - 1
        while outer >= 0 and self.frames[outer].is_forwarding:
            outer -= 1
        if outer < 0:
            return self.producer("unknown", node, index)
        call = self.frames[outer].expression
        argument = _argument_expression(scope, call, name)
        if argument is None:
            return self.producer("unknown", node, index)
        if isinstance(argument, ast.Starred) and not self.frames[outer].is_user_code:
            return self.producer("unknown", node, index)
        if isinstance(argument, ast.Starred):
            return self.producer("data", argument.value, outer)
        return self.follow(argument, outer)


def _source(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _is_skipped(binding: ast.AST, scope: ast.AST, frame: CallFrame) -> bool:
    """True if a statement is in a branch whose condition is false. The condition is evaluated with
    the values that the variables had at the failure.
    """
    for node in ast.walk(scope):
        if not isinstance(node, ast.If):
            continue
        holds = read_condition(node.test, frame)
        if holds is None:
            continue
        skipped = node.orelse if holds else node.body
        if any(part is binding for statement in skipped for part in ast.walk(statement)):
            return True
    return False


def _assigned_expression(binding: ast.Assign, name: str) -> ast.expr | None:
    """Returns the expression whose value an assignment gives to a name. If the assignment unpacks a
    tuple, returns the element that is assigned to the name. If the assignment unpacks the result of
    a call, returns the call. Returns None if the expression cannot be determined.
    """
    target = binding.targets[0]
    value = binding.value
    if not isinstance(target, (ast.Tuple, ast.List)):
        return value
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for element, part in zip(target.elts, value.elts):
            if isinstance(element, ast.Name) and element.id == name:
                return part
    return value if isinstance(value, ast.Call) else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _parameter_names(scope: Any) -> list[str]:
    arguments = scope.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _argument_expression(scope: Any, call: ast.AST | None, name: str) -> ast.AST | None:
    """Returns the expression that a call passes for a parameter. If the call unpacks a dict with
    `**` that may contain the value, the result is this dict as an `ast.Starred`.
    """
    if not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if positional[:1] in (["self"], ["cls"], ["ctx"]):
        positional.pop(0)
    if name in positional:
        position = positional.index(name)
        if position < len(call.args) and not isinstance(call.args[position], ast.Starred):
            return call.args[position]
    for keyword in call.keywords:
        if keyword.arg is None:
            return ast.Starred(keyword.value)
    return None


def _earlier_bindings(scope: ast.AST, name: str, line: int) -> list[Any]:
    """Searches the code before a line for statements that assign a value to a name. The last of
    these statements is returned first. A `for` loop that assigns the name counts too, even if the
    line is inside the loop.
    """
    bindings: list[Any] = []
    node: Any
    for node in ast.walk(scope):
        is_loop = isinstance(node, (ast.For, ast.AsyncFor))
        is_assignment = isinstance(node, (ast.Assign, ast.AugAssign)) or (
            isinstance(node, ast.AnnAssign) and node.value is not None
        )
        if not (is_loop or is_assignment) or name not in _bound_names(node):
            continue
        last_line = node.lineno if is_loop else node.end_lineno
        if last_line < line:
            bindings.append(node)
    return sorted(bindings, key=lambda node: node.lineno, reverse=True)


def _bound_names(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
