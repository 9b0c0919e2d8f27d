"""The state of a search for the expression that gave a tensor its dtype: the frames of running
functions and of functions that have returned, with their callers.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..arguments import (
    find_argument,
    has_starred_argument,
    is_first_argument,
    list_parameters,
    read_default,
    read_starred_argument,
)
from ..bindings import (
    collect_bound_names,
    contains_node,
    find_assigned_expression,
    find_earlier_bindings,
    iterate_returned_values,
    read_end_line,
    read_last_line,
    reads_changed_value,
    walk_bindings,
    walk_scope,
)
from ..expressions import UNKNOWN, TensorFacts, is_tensor, read_condition, read_value
from ..frames import CallFrame, make_returned_frame, source_text
from ..modules import ModelNames
from ..producer import Producer, Promotion
from ..program_source import Function, ProgramSource, SourceFile

_MAX_CALLERS = 4  # functions that have returned through which an argument is followed outward
_MAX_TEXT = 100  # characters of a call that a sentence quotes with its arguments


class Search(ABC):
    """A search for the expression that gave a tensor its dtype.

    frames   the frames of the traceback, and after them the frames of functions that have returned
    callers  for each function that has returned: the index of its caller's frame, the call, and the
             line of the call
    is_passed  whether the search has reached the innermost frame of the user's code
    device   the type of the device on which the tensor is; "" if it is not known
    tensor   the value of the expression at which the search began
    key      the last key or index with which the search looked into a container
    element  the position of the tensor in the tuple that a call returned
    buffer   the tensor that the search follows, if it is the buffer of a loss module
    item_frames  the indexes of frames of collators and datasets, whose results are the items of
             batches
    earlier_names  names whose value the search follows into an earlier pass of a loop: the index
             of the frame, and the name
    hidden_names  variables of a comprehension that has ended, which hide those of its function
    positions  id of a `for` of a comprehension -> the position of the item that the search follows
    inner_functions  the functions that made the items that the running collator gets
    """

    def __init__(self, frames: Sequence[CallFrame], dtype: torch.dtype, names: ModelNames) -> None:
        self.frames = list(frames)
        self.running_count = len(frames)
        self.callers: dict[int, tuple[int, ast.Call | None, int]] = {}
        self.dtype = dtype
        self.device = ""
        self.tensor: Any = UNKNOWN
        self.names = names
        self.step_count = 0
        self.is_passed = False
        self.passed: ast.AST | None = None
        self.passed_at = ""
        self.key: Any = UNKNOWN
        self.element: int | None = None
        self.promotions: list[Promotion] = []
        self.buffer: torch.Tensor | None = None
        self.item_frames: set[int] = set()
        self.inner_functions: Sequence[Any] = ()
        self.earlier_names: set[tuple[int, str]] = set()
        self.hidden_names: set[tuple[int, str]] = set()
        self.positions: dict[int, int] = {}

    @abstractmethod
    def follow(self, node: ast.AST, index: int, line: int | None = None) -> Producer:
        """Continues the search at an expression of a frame. `line` is the line at which the
        expression was evaluated. The default is the running line.
        """

    def frame_at(self, index: int, line: int) -> CallFrame:
        """Returns a frame whose variables do not contain values that were assigned after `line`.
        The values in a frame are those at the failure. For a function that has returned, they are
        its arguments.
        """
        frame = self.frames[index]
        scope = frame.scope
        if scope is None:
            return frame
        has_arguments_only = index in self.callers
        stale: dict[str, Any] = {}
        for binding in walk_bindings(scope):
            last_line = read_last_line(binding)
            is_later = line <= last_line < frame.line
            if is_later or (has_arguments_only and last_line < line):
                for name in collect_bound_names(binding):
                    stale[name] = self.read_passed_value(scope, name, index, line)
        unread_names = self.earlier_names | self.hidden_names
        stale |= {name: UNKNOWN for number, name in unread_names if number == index}
        frame = replace(frame, variables={**frame.variables, **stale}) if stale else frame
        return read_integers(frame, scope, line) if has_arguments_only else frame

    def read_passed_value(self, scope: Any, name: str, index: int, line: int) -> Any:
        """Returns the value that the caller passed for a parameter, if the function had assigned
        nothing to it before `line`. Otherwise returns UNKNOWN.
        """
        if isinstance(scope, ast.Module) or name not in list_parameters(scope):
            return UNKNOWN
        if index in self.callers or find_earlier_bindings(scope, name, line):
            return UNKNOWN
        outer, call, _ = self.find_caller(index)
        if outer < 0:
            return UNKNOWN
        owner = self.frames[index].variables.get("self")
        is_bound = not is_first_argument(owner, call, self.frames[outer])
        argument = find_argument(scope, call, name, is_bound)
        if argument is not None and not isinstance(argument, ast.Starred):
            return read_value(argument, self.frames[outer])
        value = read_starred_argument(scope, call, name, is_bound, self.frames[outer])
        return value if has_starred_argument(call) else read_default(scope, name)

    def find_caller(self, index: int) -> tuple[int, ast.AST | None, int]:
        """Returns the index of the caller's frame, its call, and the line of the call. The index is
        -1 if there is no caller in the traceback.
        """
        if index in self.callers:
            return self.callers[index]
        outer = index - 1
        while outer >= 0 and self.frames[outer].is_forwarding:
            outer -= 1
        if outer < 0:
            return -1, None, 0
        return outer, self.frames[outer].expression, self.frames[outer].line

    def producer(
        self,
        kind: str,
        node: ast.AST,
        index: int,
        *,
        path: str = "",
        module: nn.Module | None = None,
        is_proven: bool = False,
    ) -> Producer:
        frame = self.frames[index]
        text = source_text(node)
        if kind == "autocast" and isinstance(node, ast.Call) and len(text) > _MAX_TEXT:
            text = f"{source_text(node.func)}(...)"
        return Producer(
            kind,
            text,
            frame.location_of(node),
            frame.function,
            path,
            module,
            "" if self.passed is None else source_text(self.passed),
            self.passed_at,
            is_proven,
            "",
            tuple(self.promotions),
        )

    def is_skipped(self, binding: ast.AST, scope: ast.AST, index: int) -> bool:
        """True if a statement is in a branch whose condition is false. The condition is evaluated
        with the values that the variables had at the failure, if they did not change after it.
        """
        for node in walk_scope(scope):
            if not isinstance(node, ast.If):
                continue
            is_in_body = contains_node(node.body, binding)
            if not is_in_body and not contains_node(node.orelse, binding):
                continue
            holds = read_condition(node.test, self.frame_at(index, node.lineno))
            is_known = holds is not None and not reads_changed_value(node, scope)
            if is_known and holds != is_in_body:
                return True
        return False

    def list_returned_values(self, index: int) -> list[ast.expr]:
        """Returns the expressions that a function can have returned, the last one first. An
        expression in a branch that did not run is left out, and so is one after a branch that
        returned.
        """
        scope = self.frames[index].scope
        values: list[ast.expr] = []
        if scope is None:
            return values
        for value in reversed(list(iterate_returned_values(scope))):
            if self.is_skipped(value, scope, index):
                continue
            values.insert(0, value)
            if self.always_runs(value, scope, index):
                break
        return values

    def always_runs(self, expression: ast.expr, scope: ast.AST, index: int) -> bool:
        """True if all conditions around a `return` are true, as far as they can be read."""
        for node in walk_scope(scope):
            if not isinstance(node, (ast.If, ast.For, ast.While, ast.Try, ast.Match)):
                continue
            if not contains_node([node], expression):
                continue
            if not isinstance(node, ast.If) or reads_changed_value(node, scope):
                return False
            holds = read_condition(node.test, self.frame_at(index, node.lineno))
            if holds is None or holds != contains_node(node.body, expression):
                return False
        return True

    def is_conditional(self, binding: ast.AST, scope: ast.AST, index: int, line: int) -> bool:
        """True if a statement is in a branch that does not contain a line, and whose condition
        cannot be read.
        """
        for node in walk_scope(scope):
            for statements in (node.body, node.orelse) if isinstance(node, ast.If) else ():
                if not contains_node(statements, binding):
                    continue
                if statements[0].lineno <= line <= read_end_line(statements[-1]):
                    continue
                if read_condition(node.test, self.frame_at(index, node.lineno)) is None:
                    return True
        return False

    @cached_property
    def program(self) -> ProgramSource:
        return ProgramSource(self.frames[: self.running_count])

    def add_function_frame(self, node: ast.AST, source: SourceFile, depth: int = 0) -> int | None:
        """Returns the index of a frame for the function that contains a node. If the function has
        returned, adds a frame for it, whose caller is the only call of the function.
        """
        function = source.find_enclosing_function(node)
        for index, frame in enumerate(self.frames[: self.running_count]):
            if frame.scope is (source.tree if function is None else function):
                return index
        if function is None:
            self.frames.append(source.frame)
            return len(self.frames) - 1
        returned = make_function_frame(function, source.frame, self.iterate_objects())
        if returned is None or depth > _MAX_CALLERS:
            return None
        new_index = len(self.frames)
        self.frames.append(returned)
        self.callers[new_index] = (0, None, self.frames[0].line)
        caller = self.program.find_only_call(function.name)
        if caller is not None:
            call_source, call = caller
            outer = self.add_function_frame(call, call_source, depth + 1)
            if outer is not None:
                self.callers[new_index] = (outer, call, call.lineno)
        return new_index

    def iterate_objects(self) -> Iterator[object]:
        """Yields the modules of the models, and the objects that variables of the frames hold."""
        for root in self.names.roots:
            yield from root.modules()
        for frame in self.frames[: self.running_count]:
            yield from frame.variables.values()


def read_integers(frame: CallFrame, scope: Any, line: int) -> CallFrame:
    """Returns a frame of a function that has returned with the dtypes of its local variables that
    hold integers, if the function assigns each of them once.
    """
    bindings = sorted(walk_bindings(scope), key=lambda binding: binding.lineno)
    bound = Counter(name for binding in bindings for name in collect_bound_names(binding))
    for binding in bindings:
        if not isinstance(binding, ast.Assign) or read_last_line(binding) >= line:
            continue
        for name in collect_bound_names(binding):
            assigned = find_assigned_expression(binding, name)
            is_element = assigned is not binding.value or isinstance(binding.targets[0], ast.Name)
            value: Any = UNKNOWN
            if bound[name] == 1 and is_element:
                value = read_value(assigned, frame)
            if is_tensor(value) and not value.dtype.is_floating_point:
                facts = TensorFacts(value.dtype, value.device)
                frame = replace(frame, variables={**frame.variables, name: facts})
    return frame


def make_function_frame(
    function: Function, module_frame: CallFrame, objects: Iterable[object]
) -> CallFrame | None:
    """Returns a frame for a function, or for a method of a class, of a module that was imported. If
    there is one object of the class, it is `self` of the method.
    """
    owners: list[type | None] = [None]
    owners += [v for v in module_frame.global_variables.values() if isinstance(v, type)]
    for owner in owners:
        candidates = module_frame.global_variables if owner is None else vars(owner)
        for candidate in list(candidates.values()):
            is_function = isinstance(candidate, FunctionType)
            frame = make_returned_frame(candidate, {}) if is_function else None
            if frame is None or frame.scope is not function:
                continue
            instances = {id(item): item for item in objects if owner and type(item) is owner}
            if len(instances) == 1:
                method = MethodType(candidate, next(iter(instances.values())))
                return make_returned_frame(method, {})
            return frame
    return None
