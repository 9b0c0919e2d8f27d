"""Finds the expression that gave a tensor its dtype. The search starts at the line that failed and
goes backward through the source code. From a name, the search goes to its assignment. From a call
that keeps the dtype, it goes to the operand, and from a parameter to the argument that the caller
passed. From a call of the user's own function, hook or module, it goes to what this function
returned.

Variables are read with the values that they had at the failure. The search continues at an
expression only if its value has the same dtype as the tensor, or if the value cannot be read. The
local variables of a function that has returned cannot be read. So the search uses the result of
such a function only if the source code proves the dtype: an explicit cast, a new tensor, or weights
of this dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..batches import find_batch_item
from ..expressions import UNKNOWN, is_tensor, read_value
from ..frames import CallFrame
from ..modules import ModelNames
from ..producer import Producer
from .attributes import (
    find_constructors,
    follow_attribute,
    follow_constructor,
    follow_field,
    may_hold_tensor,
)
from .calls import follow_call
from .containers import follow_choice, follow_container, follow_container_item
from .items import follow_collators
from .modules import follow_sequential_input
from .names import follow_name
from .promotions import follow_widest
from .search import Search

_MAX_STEPS = 60  # operations that one search for the origin of a value follows


def find_producer(
    node: ast.AST, frames: Sequence[CallFrame], index: int, dtype: torch.dtype, names: ModelNames
) -> Producer:
    """Finds the expression that gave the value of `node` the dtype `dtype`. `node` is an expression
    in the frame with the number `index`, and the search starts there.
    """
    search = ExpressionSearch(frames, dtype, names)
    value = read_value(node, frames[index])
    search.device = value.device.type if is_tensor(value) else ""
    search.tensor = value
    result = search.follow(node, index)
    if not result.is_proven:
        result = follow_sequential_input(search, index) or result
    if result.is_proven:
        return result
    if dtype == torch.float64 and not names.has_weight_dtype(dtype):
        item = find_batch_item(frames, dtype)
        if item is not None:  # modules passed on the dtype of the batch
            search.key = item.key
            return follow_collators(search) or result
    if result.kind not in ("data", "unknown"):
        return result
    return follow_collators(search) or result


def find_constructor_argument(
    module: nn.Module,
    name: str,
    frames: Sequence[CallFrame],
    dtype: torch.dtype,
    names: ModelNames,
) -> Producer | None:
    """Finds the call that created a module, such as `nn.CrossEntropyLoss(weight=class_weights)`,
    and in this call the argument `name`. Returns the expression that gave this argument its dtype,
    or None if the user's code does not show the call.
    """
    code = getattr(type(module).__init__, "__code__", None)
    parameters = () if code is None else code.co_varnames[1 : code.co_argcount]
    for index in reversed(range(len(frames))):
        if frames[index].is_user_code:
            search = ExpressionSearch(frames, dtype, names)
            search.buffer = module._buffers.get(name)
            for call, call_index in find_constructors(search, module, index):
                arguments: dict[str | None, ast.expr] = dict(zip(parameters, call.args))
                arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
                if name in arguments:
                    return follow_constructor(search, arguments[name], call_index)
    return None


class ExpressionSearch(Search):
    """Continues a search by the kind of the expression."""

    def follow(self, node: ast.AST, index: int, line: int | None = None) -> Producer:
        if line is None:
            line = self.frames[index].line
        frame = self.frame_at(index, line)
        self.step_count += 1
        value = read_value(node, frame)
        has_other_dtype = is_tensor(value) and value.dtype != self.dtype
        if not self.is_passed and self._is_passed_in(frame, index):
            self.is_passed = True
            # otherwise a library made another tensor from it, or a loop reads the tensors of a dict
            if not has_other_dtype and not isinstance(value, dict):
                self.passed = node
                self.passed_at = frame.location
        if self.step_count > _MAX_STEPS or has_other_dtype:
            return self.producer("unknown", node, index)
        path = self.names.tensor_path(value)
        if path is not None and value is not self.buffer:
            return self.producer("parameter", node, index, path=path, is_proven=True)
        return self._follow_kind(node, value, frame, index, line)

    def _is_passed_in(self, frame: CallFrame, index: int) -> bool:
        """True for a running function of the user's code, whose expression a cast can replace."""
        is_raised_here = isinstance(frame.statement, ast.Raise)  # a check, where no cast helps
        return frame.is_user_code and index < self.running_count and not is_raised_here

    def _follow_kind(
        self, node: ast.AST, value: Any, frame: CallFrame, index: int, line: int
    ) -> Producer:
        """Continues the search by the kind of the expression. `value` is its value in the frame."""
        match node:
            case ast.Name(name):
                return follow_name(self, node, name, index, line)
            case ast.Attribute(ast.Name("self"), name) if may_hold_tensor(value):
                return follow_attribute(self, node, name, index, frame.variables.get("self"))
            case ast.Attribute() if is_tensor(value):
                return follow_field(self, node, index, line)
            case ast.Attribute(ast.Call() | ast.Name() as owner, name) if value is UNKNOWN:
                self.key = name
                return self.follow(owner, index, line)  # an output of a model, such as `.logits`
            case ast.Subscript():
                return follow_container_item(self, node, index, line)
            case ast.BinOp(left, _, right):
                return follow_widest(self, [left, right], node, index, line)
            case ast.UnaryOp(_, operand):
                return self.follow(operand, index, line)
            case ast.IfExp():
                return follow_choice(self, node, index, line)
            case ast.Tuple(items) | ast.List(items) if self.key in range(len(items)):
                return self.follow(items[self.key], index, line)
            case ast.DictComp() | ast.ListComp() | ast.GeneratorExp() | ast.Dict():
                return follow_container(self, node, index, line)
            case ast.Call():
                return follow_call(self, node, index, line)
        return self.producer("unknown", node, index)
