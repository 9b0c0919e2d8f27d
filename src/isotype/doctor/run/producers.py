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
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...dtypes import format_dtype
from .arrays import find_float64_origin
from .autocast import AutocastState, find_output_cast, read_frame_region
from .batches import find_batch_item
from .casts import find_cast, has_unread_dtype, read_cast_dtype
from .expressions import (
    CASTING_METHODS,
    CREATION_FUNCTIONS,
    DTYPE_KEEPING_METHODS,
    PROMOTING_METHODS,
    UNKNOWN,
    TensorFacts,
    is_tensor,
    node_keyword,
    read_condition,
    read_function,
    read_value,
)
from .frames import CallFrame, make_module_frame, make_returned_frame
from .hooks import describe_hook
from .modules import ModelNames, floating_weight_dtypes
from .producer import Producer, Promotion
from .rows import RowSource, find_row_source, follow_rows
from .user_files import iterate_user_files

_FOLLOWED_OPERANDS = (ast.Call, ast.BinOp, ast.Name, ast.Attribute, ast.ListComp, ast.Subscript)
# functions and methods whose operands autocast casts to its dtype
_AUTOCAST_FUNCTIONS = frozenset(
    ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "linear")
    + ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    + ("scaled_dot_product_attention", "chain_matmul")
)
# functions that keep the dtype of a NumPy array
_ARRAY_FUNCTIONS = frozenset(("from_numpy", "as_tensor", "tensor"))
# functions and methods that autocast computes in fp32, on a CPU and on a GPU
_FP32_FUNCTIONS = frozenset(
    ("prod", "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "kl_div")
)
_FP32_FUNCTIONS_OF_GPUS = frozenset(
    ("exp", "log", "log2", "log10", "log1p", "pow", "rsqrt", "reciprocal", "softplus", "norm")
    + ("softmax", "log_softmax", "cumsum", "cumprod", "sum", "logsumexp", "layer_norm")
    + ("group_norm", "cosine_similarity", "cross_entropy")
)
# calls that create integers, which later operations make floats
_INTEGER_CREATION = re.compile(r"torch\.(?:randint\(|arange\((?!.*(?:dtype|\d\.)))")
_MAX_STEPS = 60  # operations that one search for the origin of a value follows
_MAX_CALLERS = 4  # functions that have returned through which an argument is followed outward
_MAX_DEPTH = 3  # objects inside of objects in which a stored tensor is searched
_MAX_TEXT = 100  # characters of a call that a sentence quotes with its arguments
_ITERATION_WRAPPERS = frozenset(("enumerate", "tqdm", "trange", "iter", "islice", "zip"))


def find_producer(
    node: ast.AST, frames: Sequence[CallFrame], index: int, dtype: torch.dtype, names: ModelNames
) -> Producer:
    """Finds the expression that gave the value of `node` the dtype `dtype`. `node` is an expression
    in the frame with the number `index`, and the search starts there.
    """
    search = Search(frames, dtype, names)
    value = read_value(node, frames[index])
    search.device = value.device.type if is_tensor(value) else ""
    search.tensor = value
    result = search.follow(node, index)
    if not result.is_proven:
        result = search.follow_sequential_input(index) or result
    if result.is_proven:
        return result
    if dtype == torch.float64 and not names.has_weight_dtype(dtype):
        item = find_batch_item(frames, dtype)
        if item is not None:  # modules passed on the dtype of the batch
            search.key = item.key
            return search.follow_collators() or result
    if result.kind not in ("data", "unknown"):
        return result
    return search.follow_collators() or result


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
            search = Search(frames, dtype, names)
            search.buffer = module._buffers.get(name)
            for call, call_index in search.find_constructors(module, index):
                arguments: dict[str | None, ast.expr] = dict(zip(parameters, call.args))
                arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
                if name in arguments:
                    return search.follow_constructor(arguments[name], call_index)
    return None


def find_assigned_call(node: ast.AST, frame: CallFrame) -> ast.Call | None:
    """Returns the call whose result was last assigned to a name before the running line."""
    scope = frame.scope
    if scope is None or not isinstance(node, ast.Name):
        return None
    for binding in _earlier_bindings(scope, node.id, frame.line):
        if isinstance(binding, ast.Assign) and isinstance(binding.value, ast.Call):
            return binding.value
    return None


def find_passed_argument(frame: CallFrame, caller: CallFrame, name: str) -> ast.expr | None:
    """Returns the expression that the call in a caller's frame passes for a parameter. Returns None
    if the function assigns another value to it.
    """
    scope = frame.scope
    if scope is None or isinstance(scope, ast.Module) or name not in _parameter_names(scope):
        return None
    if _earlier_bindings(scope, name, frame.line):
        return None
    is_bound = not _is_first_argument(frame.variables.get("self"), caller.expression, caller)
    argument = _argument_expression(scope, caller.expression, name, is_bound)
    if not isinstance(argument, ast.expr) or isinstance(argument, ast.Starred):
        return None
    return argument


class Search:
    """Searches the code for the expression that gave a tensor its dtype.

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

    def follow(self, node: ast.AST, index: int, line: int | None = None) -> Producer:
        """`line` is the line at which the expression was evaluated. The default is the running
        line.
        """
        if line is None:
            line = self.frames[index].line
        frame = self.frame_at(index, line)
        self.step_count += 1
        value = read_value(node, frame)
        has_other_dtype = is_tensor(value) and value.dtype != self.dtype
        is_raised_here = isinstance(frame.statement, ast.Raise)  # a check, where no cast helps
        is_candidate = frame.is_user_code and index < self.running_count and not is_raised_here
        if not self.is_passed and is_candidate:
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
        match node:
            case ast.Name(name):
                return self.follow_name(node, name, index, line)
            case ast.Attribute(ast.Name("self"), name) if _may_hold_tensor(value):
                return self.follow_attribute(node, name, index, frame.variables.get("self"))
            case ast.Attribute() if is_tensor(value):
                return self.follow_field(node, index, line)
            case ast.Attribute(ast.Call() | ast.Name() as owner, name) if value is UNKNOWN:
                self.key = name
                return self.follow(owner, index, line)  # an output of a model, such as `.logits`
            case ast.Subscript():
                return self.follow_container_item(node, index, line)
            case ast.BinOp(left, _, right):
                return self.follow_widest([left, right], node, index, line)
            case ast.UnaryOp(_, operand):
                return self.follow(operand, index, line)
            case ast.IfExp():
                return self.follow_choice(node, index, line)
            case ast.Tuple(items) | ast.List(items) if self.key in range(len(items)):
                return self.follow(items[self.key], index, line)
            case ast.DictComp() | ast.ListComp() | ast.GeneratorExp() | ast.Dict():
                return self.follow_container(node, index, line)
            case ast.Call():
                return self.follow_call(node, index, line)
        return self.producer("unknown", node, index)

    def follow_field(self, node: ast.Attribute, index: int, line: int) -> Producer:
        """Continues the search at a tensor that an object holds: at the assignment of the attribute
        in the object's class, or else at the call that made the object.
        """
        owner = read_value(node.value, self.frame_at(index, line))
        result = self.follow_attribute(node, node.attr, index, owner)
        # an attribute of a library's object says nothing about the origin of its value
        if result.is_proven and result.kind != "attribute":
            return result
        self.key = node.attr
        result = self.follow(node.value, index, line)
        return result if result.is_proven else self.producer("unknown", node, index)

    def follow_container_item(self, node: ast.Subscript, index: int, line: int) -> Producer:
        """Continues the search in the container of an item."""
        frame = self.frame_at(index, line)
        self.key = read_value(node.slice, frame)
        stored = _find_stored_item(frame.scope, node, line)
        if stored is not None:
            return self.follow(stored, index, stored.lineno)
        key = self.key
        container = read_value(node.value, frame)
        result = self.follow(node.value, index, line)
        if result.is_proven or not isinstance(key, str) or not isinstance(container, dict):
            return result
        return self.follow_item_writes(key, container, node, index) or result

    def follow_item_writes(
        self, key: str, container: dict[Any, Any], node: ast.AST, index: int
    ) -> Producer | None:
        """Continues the search at the assignment `PARAMETER[key] = ...` of a function that has
        returned, as a module has that stores its result in the dict that it gets. If the
        assignments prove nothing, the origin is not known: the line that made the dict did not make
        this value. Returns None if there is no such assignment.
        """
        is_written = False
        results = []
        for file, tree, module_frame in list(iterate_user_files(self.frames[: self.running_count])):
            for binding in ast.walk(tree):
                match binding:
                    case ast.Assign([ast.Subscript(ast.Name(name), ast.Constant(value))]):
                        pass
                    case _:
                        continue
                if value != key:
                    continue
                new_index = self.add_function_frame(binding, tree, module_frame, file)
                if new_index is None or new_index < self.running_count:
                    continue
                frame = self.frames[new_index]
                if isinstance(frame.scope, ast.Module) or name not in _parameter_names(frame.scope):
                    continue
                is_written = True
                variables = {**frame.variables, name: container}
                self.frames[new_index] = replace(frame, variables=variables)
                self.key = UNKNOWN
                result = self.follow(binding.value, new_index, binding.lineno)
                if result.is_proven:
                    results.append(result)
        if len({result.location for result in results}) == 1:
            return results[0]
        return self.producer("unknown", node, index) if is_written else None

    def follow_choice(self, node: ast.IfExp, index: int, line: int) -> Producer:
        """Continues the search in the part of `X if CONDITION else Y` that was evaluated. If the
        condition cannot be read, continues in both.
        """
        holds = read_condition(node.test, self.frame_at(index, line))
        parts = [node.body, node.orelse]
        if holds is not None:
            parts = parts[:1] if holds else parts[1:]
        results = [self.follow(part, index, line) for part in parts]
        return next((result for result in results if result.is_proven), results[0])

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
        for binding in _walk_bindings(scope):
            last_line = _last_line(binding)
            is_later = line <= last_line < frame.line
            if is_later or (has_arguments_only and last_line < line):
                for name in _bound_names(binding):
                    stale[name] = self.read_passed_value(scope, name, index, line)
        stale |= {name: UNKNOWN for number, name in self.earlier_names if number == index}
        frame = replace(frame, variables={**frame.variables, **stale}) if stale else frame
        return _read_integers(frame, scope, line) if has_arguments_only else frame

    def read_passed_value(self, scope: Any, name: str, index: int, line: int) -> Any:
        """Returns the value that the caller passed for a parameter, if the function had assigned
        nothing to it before `line`. Otherwise returns UNKNOWN.
        """
        if isinstance(scope, ast.Module) or name not in _parameter_names(scope):
            return UNKNOWN
        if index in self.callers or _earlier_bindings(scope, name, line):
            return UNKNOWN
        outer, call, _ = self.find_caller(index)
        if outer < 0:
            return UNKNOWN
        owner = self.frames[index].variables.get("self")
        is_bound = not _is_first_argument(owner, call, self.frames[outer])
        argument = _argument_expression(scope, call, name, is_bound)
        if argument is not None and not isinstance(argument, ast.Starred):
            return read_value(argument, self.frames[outer])
        value = _read_starred(scope, call, name, is_bound, self.frames[outer])
        has_star = isinstance(call, ast.Call) and any(
            isinstance(part, ast.Starred) for part in _iterate_arguments(call)
        )
        return value if has_star else _read_default(scope, name)

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
        text = _source(node)
        if kind == "autocast" and isinstance(node, ast.Call) and len(text) > _MAX_TEXT:
            text = f"{_source(node.func)}(...)"
        return Producer(
            kind,
            text,
            frame.location_of(node),
            frame.function,
            path,
            module,
            "" if self.passed is None else _source(self.passed),
            self.passed_at,
            is_proven,
            "",
            tuple(self.promotions),
        )

    def follow_widest(
        self, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
    ) -> Producer:
        """Continues the search at the first operand that has the wanted dtype. If no operand has
        it, the search continues at the operands whose values cannot be read. If these do not lead
        to a proof either, the operation itself gave its result the dtype.
        """
        frame = self.frame_at(index, line)
        for operand in nodes:
            value = read_value(operand, frame)
            items = value if isinstance(value, (list, tuple)) else [value]
            if any(is_tensor(item) and item.dtype == self.dtype for item in items):
                self.add_promotion(node, operand, index)
                result = self.follow(operand, index, line)
                return self.find_cast_operand(result, nodes, node, index, line) or result
        computed = self.follow_autocast(node, index, line)
        if computed is not None:
            return computed
        results = []
        for operand in nodes:
            if not isinstance(operand, _FOLLOWED_OPERANDS):
                continue
            if read_value(operand, frame) is UNKNOWN:
                count = len(self.promotions)
                self.add_promotion(node, operand, index)
                result = self.follow(operand, index, line)
                if result.is_proven:
                    return result
                results.append(result)
                del self.promotions[count:]
        value = read_value(node, frame)
        values = [read_value(operand, frame) for operand in nodes]
        dtypes = {value.dtype for value in values if is_tensor(value)}
        is_from_integers = dtypes and not any(dtype.is_floating_point for dtype in dtypes)
        if is_from_integers and is_tensor(value) and value.dtype == self.dtype:
            names = " and ".join(sorted(map(format_dtype, dtypes)))
            reason = f"it computes floats from {names}"
            return replace(self.producer("call", node, index, is_proven=True), reason=reason)
        known = [result for result in results if result.kind != "unknown"]
        return (known or results or [self.producer("call", node, index)])[0]

    def find_cast_operand(
        self, result: Producer, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
    ) -> Producer | None:
        """Returns the cast of another operand of a function that has returned, if the operation
        needs one dtype. The code cast this operand to the dtype of a table that an object holds,
        such as the filters of a spectrogram.
        """
        if index < self.running_count or result.kind not in ("attribute", "creation"):
            return None
        is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
        name = _source(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if not is_product and name not in _AUTOCAST_FUNCTIONS:
            return None
        for operand in nodes:
            if isinstance(operand, _FOLLOWED_OPERANDS):
                other = self.follow(operand, index, line)
                if other.kind == "cast" and other.is_proven:
                    return other
        return None

    def follow_autocast(self, node: ast.AST, index: int, line: int) -> Producer | None:
        """Returns the operation that autocast computed in the wanted dtype, if autocast was on
        there. If a function that has returned switched it on, returns the call of this function.
        """
        is_cast = self.is_autocast_operation(node, index, line)
        if not is_cast and not self.is_fp32_operation(node, index, line):
            return None
        state, owner = self.find_autocast(index, line)
        is_of_device = not state.device or self.device in ("", state.device)
        wanted = torch.float32 if self.is_fp32_operation(node, index, line) else state.dtype
        if not state.is_on or self.dtype != wanted or not is_of_device:
            return None
        reason = f"it runs under autocast ({state.location})"
        if wanted != state.dtype:
            reason = f"autocast ({state.location}) computes it in fp32"
            return replace(self.producer("autocast", node, index, is_proven=True), reason=reason)
        while index in self.callers and self.callers[index][1] is not None:
            if index == owner:
                function = self.frames[index].code.co_qualname.rpartition("<locals>.")[2]
                reason = f"{function} runs under autocast ({state.location})"
            is_last = index == owner
            index, call, _ = self.callers[index]
            assert call is not None
            node = call
            if is_last:
                break
        return replace(self.producer("autocast", node, index, is_proven=True), reason=reason)

    def is_fp32_operation(self, node: ast.AST, index: int, line: int) -> bool:
        """True for a function or a method of a tensor that autocast computes in fp32."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        name = node.func.attr
        is_known = name in _FP32_FUNCTIONS
        if self.device not in ("", "cpu"):
            is_known = is_known or name in _FP32_FUNCTIONS_OF_GPUS
        value = read_function(node.func, self.frame_at(index, line))
        is_own = isinstance(value, (FunctionType, MethodType, nn.Module))
        is_torch = getattr(value, "__module__", "").startswith("torch")
        return is_known and (is_torch or not is_own)

    def is_autocast_operation(self, node: ast.AST, index: int, line: int) -> bool:
        """True for a matrix product, for a function such as `F.linear`, and for a module that has
        weights of a matrix or a convolution.
        """
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        if not isinstance(node, ast.Call):
            return False
        module = read_function(node.func, self.frame_at(index, line))
        if isinstance(module, nn.Module):
            return any(
                parameter.dim() > 1
                for part in module.modules()
                if not isinstance(part, nn.Embedding)
                for parameter in part.parameters(recurse=False)
            )
        return _source(node.func).rpartition(".")[2] in _AUTOCAST_FUNCTIONS

    def find_autocast(self, index: int, line: int) -> tuple[AutocastState, int]:
        """Returns the autocast state at a line, and the index of the frame whose code sets it. The
        line may be in a function that has returned. The index is -1 if no code sets the state.
        """
        while True:
            state = read_frame_region(replace(self.frames[index], line=line))
            if state is not None:
                return state, index
            if index in self.callers:
                index, _, line = self.callers[index]
            elif 0 < index < self.running_count:
                index -= 1
                line = self.frames[index].line
            else:
                return AutocastState(), -1

    def add_promotion(self, node: ast.AST, operand: ast.AST, index: int) -> None:
        """Adds an operation of two tensors to the list of promotions. Only the lines of running
        functions are listed, because only their variables can be read.
        """
        frame = self.frames[index]
        if index >= self.running_count or not frame.is_user_code:
            return
        if isinstance(node, ast.BinOp) and not isinstance(node.right, ast.Constant):
            operation = type(node.op).__name__.replace("Mult", "Mul")
        elif isinstance(node, ast.Call):
            operation = _source(node.func).rpartition(".")[2].capitalize()
        else:
            return
        self.promotions.append(Promotion(operation, _source(operand), frame.location_of(operand)))

    def follow_container(self, node: ast.AST, index: int, line: int) -> Producer:
        """Continues the search in a dict or list that is written in the source code."""
        frame = self.frame_at(index, line)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if key is not None and read_value(key, frame) == self.key:
                    return self.follow_item(value, index, line)
            return self.producer("data", node, index)
        part = node.value if isinstance(node, ast.DictComp) else node.elt  # type: ignore[attr-defined]
        generators = node.generators  # type: ignore[attr-defined]
        match part, generators[0].iter, generators[0].target:
            case ast.Call(ast.Attribute(ast.Name(name), method)), ast.Tuple(items), ast.Name(
                target
            ):
                # as in `q, k = (x.transpose(1, 0) for x in (q, k))`
                is_kept = name == target and method in DTYPE_KEEPING_METHODS
                if is_kept and self.key in range(len(items)):
                    return self.follow(items[self.key], index, line)
        cast = find_cast(part, frame, self.dtype)
        if cast is not None:
            return self.producer("cast", cast, index, is_proven=True)
        row_result = self.follow_row(part, index, line)
        if row_result is not None:
            return row_result
        if isinstance(part, ast.Call):
            result = self.follow_call(part, index, line)
            if result.is_proven:
                return result
        return self.producer("data", node, index)

    def follow_row(self, part: ast.AST, index: int, line: int) -> Producer | None:
        """If a collator reads `row[key]` of each row, continues the search in the dataset, which
        made the rows.
        """
        if index not in self.item_frames:
            return None
        for node in ast.walk(part):
            match node:
                case ast.Subscript(ast.Name(), ast.Constant(key)):
                    functions = self.inner_functions
                    element = None
                    if isinstance(key, int):
                        element = key
                    self.key = key
                    return self.follow_item_functions(functions, element, index, line)
        return None

    def follow_call(self, node: ast.Call, index: int, line: int) -> Producer:
        frame = self.frame_at(index, line)
        if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            result = self.follow_next_item(node, index, line)
            return result or self.producer("data", node, index)
        function = read_function(node.func, frame)
        if isinstance(function, nn.Module):
            return self.follow_module(function, node, index, line)
        field = _find_field(node, function, self.key)
        if field is not None and isinstance(function, type):  # an object, such as an output
            self.key = UNKNOWN
            return self.follow_item(field, index, field.lineno)
        if isinstance(node.func, ast.Attribute):
            result = self.follow_method(node, node.func, index, line)
            if result is not None:
                return result
        is_torch_function = getattr(function, "__module__", "").startswith("torch") or isinstance(
            function, type(torch.add)
        )
        if is_torch_function and node.args:
            if any(read_value(part, frame) is self.dtype for part in _arguments(node)):
                return self.producer("cast", node, index, is_proven=True)
            operands = list(node.args)
            if isinstance(operands[0], (ast.List, ast.Tuple)):
                operands = list(operands[0].elts)
            return self.follow_widest(operands, node, index, line)
        return (
            self.follow_returned(function, node, index, line)
            or self.follow_passed_function(node, index, line)
            or self.follow_stored_tensor(node, index, line)
            or self.follow_first_argument(node, index, line)
            or self.follow_autocast(node, index, line)
            or self.follow_wide_argument(node, index, line)
            or self.producer("call", node, index)
        )

    def follow_first_argument(self, node: ast.Call, index: int, line: int) -> Producer | None:
        """Continues the search at the first argument of a helper that a library calls, if the
        argument has the dtype.
        """
        frame = self.frame_at(index, line)
        arguments = _arguments(node)
        if not arguments or frame.is_user_code:
            return None
        value = read_value(arguments[0], frame)
        if is_tensor(value) and value.dtype == self.dtype:
            return self.follow(arguments[0], index, line)
        result = self.follow(arguments[0], index, line) if value is UNKNOWN else None
        return result if result is not None and result.is_proven else None

    def follow_stored_tensor(self, node: ast.Call, index: int, line: int) -> Producer | None:
        """Continues the search at the line of the user's code that wrote a tensor into an object
        of a library whose method returned the tensor, such as a cache of keys and values.
        """
        if not isinstance(node.func, ast.Attribute):
            return None
        owner = read_value(node.func.value, self.frame_at(index, line))
        stored = [] if owner is UNKNOWN else list(_iterate_stored_tensors(owner))
        names = [name for name, tensor in stored if tensor is self.tensor]
        if not names:  # the method returned another tensor that it computed from one of these
            names = [name for name, _ in stored]
        for name in dict.fromkeys(names):
            result = self.follow_writes(name, owner)
            if result is not None:
                return result
        return self.follow_method_calls(node.func.attr, owner) if stored else None

    def follow_method_calls(self, name: str, owner: object) -> Producer | None:
        """Continues the search at the argument that the user's code passes to a method of a
        library's object, if the same method returns it later, as `update` of a cache does.
        """
        element = self.element or 0
        results = []
        for file, tree, module_frame in list(iterate_user_files(self.frames[: self.running_count])):
            for call in ast.walk(tree):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                if call.func.attr != name or len(call.args) <= element:
                    continue
                index = self.add_function_frame(call, tree, module_frame, file)
                if index is None or self.is_other_object(call.func.value, index, owner):
                    continue
                self.key = self.element = None
                result = self.follow(call.args[element], index, call.lineno)
                if result.is_proven:
                    place = self.frames[index].location_of(call)
                    result = replace(result, reason=f"`{_source(call)}` ({place}) stores it")
                    stored = _source(call.args[element])
                    results.append(replace(result, stored=stored, stored_at=place))
        return results[0] if len({result.location for result in results}) == 1 else None

    def is_other_object(self, node: ast.expr, index: int, owner: object) -> bool:
        """True if an expression is an object of another class."""
        value = read_value(node, self.frames[index])
        return value is not UNKNOWN and type(value) is not type(owner)

    def follow_writes(self, name: str, owner: object) -> Producer | None:
        """Continues the search at the only assignment `OBJECT.NAME = ...` of the user's files that
        gives the attribute the wanted dtype, or a half dtype which the model's dtype widens to it.
        The assignment may be in a function that has returned.
        """
        usual = self.names.majority_dtype()
        dtypes = [self.dtype]
        if self.dtype == torch.float32 and usual in (torch.bfloat16, torch.float16):
            dtypes += [half for half in (torch.bfloat16, torch.float16) if half != usual]
        wanted = self.dtype
        for dtype in dtypes:
            results = []
            for target, value, index in list(self.iterate_writes(name, owner)):
                self.dtype, self.key = dtype, UNKNOWN
                result = self.follow(value, index, value.lineno)
                self.dtype = wanted
                if not result.is_proven:
                    continue
                place = self.frames[index].location_of(value)
                reason = f"`{_source(target)} = {_source(value)}` ({place}) stores it"
                if dtype != wanted and usual is not None:
                    narrow, wide = format_dtype(dtype), format_dtype(wanted)
                    reason += f" in {narrow}, and {narrow} with {format_dtype(usual)} gives {wide}"
                results.append(replace(result, reason=reason))
            if len({result.location for result in results}) == 1:
                return results[0]
        return None

    def iterate_writes(self, name: str, owner: object) -> Iterator[tuple[ast.expr, ast.expr, int]]:
        """Yields the target and the value of each assignment `OBJECT.NAME = ...` in the user's
        files, and the index of a frame for the function that contains it.
        """
        for file, tree, module_frame in list(iterate_user_files(self.frames[: self.running_count])):
            for node in ast.walk(tree):
                if not isinstance(node, ast.Assign):
                    continue
                target = node.targets[0]
                while isinstance(target, ast.Subscript):
                    target = target.value
                if not isinstance(target, ast.Attribute) or target.attr != name:
                    continue
                index = self.add_function_frame(node, tree, module_frame, file)
                holder = UNKNOWN if index is None else read_value(target.value, self.frames[index])
                is_own_class = _source(target.value) == "self" and holder is not owner
                if index is not None and not is_own_class:
                    yield target, node.value, index

    def add_function_frame(
        self, node: ast.AST, tree: ast.Module, module_frame: CallFrame, file: str, depth: int = 0
    ) -> int | None:
        """Returns the index of a frame for the function that contains a node. If the function has
        returned, adds a frame for it, whose caller is the only call of the function.
        """
        function = _enclosing_function(tree, node)
        for index, frame in enumerate(self.frames[: self.running_count]):
            if frame.scope is (tree if function is None else function):
                return index
        if function is None:
            self.frames.append(module_frame)
            return len(self.frames) - 1
        returned = _make_function_frame(function, module_frame, self.iterate_objects())
        if returned is None or depth > _MAX_CALLERS:
            return None
        new_index = len(self.frames)
        self.frames.append(returned)
        self.callers[new_index] = (0, None, self.frames[0].line)
        calls = [
            (call, *source)
            for source in iterate_user_files(self.frames[: self.running_count])
            for call in ast.walk(source[1])
            if isinstance(call, ast.Call) and _source(call.func).rpartition(".")[2] == function.name
        ]
        if len(calls) == 1:
            call, call_file, call_tree, call_frame = calls[0]
            outer = self.add_function_frame(call, call_tree, call_frame, call_file, depth + 1)
            if outer is not None:
                self.callers[new_index] = (outer, call, call.lineno)
        return new_index

    def iterate_objects(self) -> Iterator[object]:
        """Yields the modules of the models, and the objects that variables of the frames hold."""
        for root in self.names.roots:
            yield from root.modules()
        for frame in self.frames[: self.running_count]:
            yield from frame.variables.values()

    def follow_wide_argument(self, node: ast.Call, index: int, line: int) -> Producer | None:
        """Continues the search at the arguments of a library's function, if the widest of its
        tensors has the wanted dtype: `scheduler.add_noise(latents, noise, step)` promotes.
        """
        frame = self.frame_at(index, line)
        values = [(argument, read_value(argument, frame)) for argument in _arguments(node)]
        tensors = [(argument, value.dtype) for argument, value in values if is_tensor(value)]
        dtypes = {dtype for _, dtype in tensors if dtype.is_floating_point}
        if max(dtypes, key=lambda dtype: dtype.itemsize, default=None) != self.dtype:
            return None
        argument = next(argument for argument, dtype in tensors if dtype == self.dtype)
        result = self.follow(argument, index, line)
        return result if result.is_proven else None

    def follow_method(
        self, node: ast.Call, method: ast.Attribute, index: int, line: int
    ) -> Producer | None:
        """Continues the search at a method of a tensor or of a batch. Returns None if the method is
        another one.
        """
        frame = self.frame_at(index, line)
        owner = read_value(method.value, frame)
        source = None if frame.is_user_code else _dtype_source(node)
        source_value = read_value(source, frame)
        if source is not None and is_tensor(source_value) and source_value.dtype == self.dtype:
            return self.follow(source, index, line)  # a library casts to the dtype of an argument
        result = read_value(node, frame)
        if is_tensor(owner) and isinstance(result, TensorFacts):
            if owner.dtype == result.dtype:
                return self.follow(method.value, index, line)
            is_proven = result.dtype == self.dtype
            if method.attr not in CASTING_METHODS and method.attr != "type_as":
                reason = f"it computes floats from {format_dtype(owner.dtype)}"
                computed = self.producer("call", node, index, is_proven=is_proven)
                return replace(computed, reason=reason)
            return self.producer("cast", node, index, is_proven=is_proven)
        if method.attr in ("float", "half", "bfloat16", "double", "to", "type"):
            dtype = read_cast_dtype(node, frame)
            if dtype is None and not has_unread_dtype(node, frame):  # changes only the device
                return self.follow(method.value, index, line)
            return self.producer("cast", node, index, is_proven=dtype == self.dtype)
        if owner is UNKNOWN or is_tensor(owner):
            return self.follow_tensor_method(node, method, index, line)
        if owner is torch and method.attr in CREATION_FUNCTIONS:
            is_proven = is_tensor(result) and result.dtype == self.dtype
            if not is_proven and method.attr == "as_tensor" and len(node.args) == 1:
                kept = self.follow(node.args[0], index, line)  # a tensor stays as it is
                if kept.is_proven:
                    return kept
            if not is_proven:
                return self.follow_array(node, index, line)
            return self.producer("creation", node, index, is_proven=True)
        return None

    def follow_tensor_method(
        self, node: ast.Call, method: ast.Attribute, index: int, line: int
    ) -> Producer | None:
        """Continues the search at the tensor of a method such as `cumsum`, or at one of the
        operands of a method such as `mul`. An argument `dtype=` makes the method a cast.
        """
        if self.is_fp32_operation(node, index, line):
            computed = self.follow_autocast(node, index, line)
            if computed is not None:
                return computed
        promotes = method.attr in PROMOTING_METHODS
        if not promotes and method.attr not in DTYPE_KEEPING_METHODS:
            return None
        frame = self.frame_at(index, line)
        if read_value(node_keyword(node, "dtype"), frame) is self.dtype:
            return self.producer("cast", node, index, is_proven=True)
        if promotes:
            return self.follow_widest([method.value, *node.args], node, index, line)
        value = read_value(method.value, frame)
        may_have_dtype = value is UNKNOWN or (is_tensor(value) and value.dtype == self.dtype)
        return self.follow(method.value, index, line) if may_have_dtype else None

    def follow_array(self, node: ast.Call, index: int, line: int) -> Producer:
        """Returns the call that makes a tensor of a NumPy array. It gives the tensor fp64, if the
        source code shows that NumPy computed the array in fp64.
        """
        result = self.producer("creation", node, index)
        keeps_array = _source(node.func).rpartition(".")[2] in _ARRAY_FUNCTIONS and node.args
        if self.dtype != torch.float64 or not keeps_array or node_keyword(node, "dtype"):
            return result
        frame = replace(self.frame_at(index, line), line=line)
        origin = find_float64_origin(node.args[0], frame)
        if origin is None:
            return result
        reason = f"NumPy computes `{origin.text}` ({origin.location}) in fp64"
        return replace(result, reason=reason, is_proven=True)

    def follow_module(self, module: nn.Module, node: ast.Call, index: int, line: int) -> Producer:
        """Continues the search at a call of a module: in its forward hooks, in its weights, in the
        forward of a class of the user's code, and for a module without weights at its input.
        """
        path = self.names.module_path(module)
        result = self.follow_hooks(module, "forward hook", index)
        if result is not None:
            return result
        output_cast = find_output_cast(module, self.frames[: self.running_count])
        if output_cast and self.dtype == torch.float32:
            result = self.producer("autocast", node, index, path=path, is_proven=True)
            return replace(result, reason=output_cast)
        dtypes = floating_weight_dtypes(module)
        if dtypes == {self.dtype}:
            return self.producer("module", node, index, path=path, module=module, is_proven=True)
        if isinstance(module, nn.Sequential):
            computed = self.follow_autocast(node, index, line)
            return computed or self.follow_sequential(module, node, index, line)
        forward = MethodType(type(module).forward, module)
        result = self.follow_returned(forward, node, index, line)
        if result is None:
            result = self.follow_autocast(node, index, line)
        if result is not None:
            return result
        is_weightless = not dtypes and type(module).__module__.startswith("torch.nn")
        if node.args:
            # its weights do not have the dtype, so its input may have it
            count = len(self.promotions)
            result = self.follow(node.args[0], index, line)
            if is_weightless or result.is_proven:
                return result
            del self.promotions[count:]
        return self.producer("module", node, index, path=path, module=module)

    def follow_sequential(
        self, module: nn.Sequential, node: ast.Call, index: int, line: int
    ) -> Producer:
        for child in reversed(module):
            result = self.follow_hooks(child, "forward hook", index)
            if result is not None:
                return result
            dtypes = floating_weight_dtypes(child)
            if not dtypes:
                continue
            path = self.names.module_path(child)
            is_proven = dtypes == {self.dtype}
            if not is_proven:
                forward = MethodType(type(child).forward, child)
                result = self.follow_returned(forward, None, index, line)
                if result is not None:
                    return result
                path = self.names.module_path(module)
                child = module
            return self.producer(
                "module", node, index, path=path, module=child, is_proven=is_proven
            )
        if node.args:
            return self.follow(node.args[0], index, line)
        return self.producer("module", node, index, module=module)

    def follow_hooks(self, module: nn.Module, kind: str, index: int) -> Producer | None:
        """Searches the hooks of a module in the user's code, the last one first. `kind` is
        `forward hook` or `forward pre-hook`.
        """
        hooks = module._forward_hooks if kind == "forward hook" else module._forward_pre_hooks
        for hook in reversed(list(hooks.values())):
            result = self.follow_returned(hook, None, index)
            if result is not None:
                path = self.names.module_path(module)
                files = [frame.file for frame in self.frames if frame.is_user_code]
                text = describe_hook(hook, kind, path, files)
                return replace(result, hook=text)
        return None

    def follow_returned(
        self,
        function: Any,
        call: ast.Call | None,
        index: int,
        line: int | None = None,
        *,
        is_item: bool = False,
    ) -> Producer | None:
        """Searches the values that a function of the user's code returned. Returns None unless the
        source code proves that a value has the dtype.

        is_item  whether the function is a collator or a method of a dataset. The expression that it
                 returns under the wanted key then gave the tensor its dtype.
        """
        if line is None:
            line = self.frames[index].line
        variables = self.read_arguments(function, call, index, line)
        frame = make_returned_frame(_as_function(function), variables)
        if frame is None or any(frame.code is other.code for other in self.frames):
            return None
        new_index = len(self.frames)
        self.frames.append(frame)
        self.callers[new_index] = (index, call, line)
        if is_item:
            self.item_frames.add(new_index)
        element = self.element
        self.element = None
        values = list(_returned_values(frame.scope))
        for value in values:
            if isinstance(value, ast.Tuple) and element is not None and element < len(value.elts):
                result = self.follow_item(value.elts[element], new_index, value.lineno)
            else:
                result = self.follow(value, new_index, value.lineno)
            if result.is_proven:
                return result
        for code in _code_of_result(frame.scope, values) if call is None else ():
            cast = find_cast(code, frame, self.dtype)
            if cast is not None:
                return self.producer("cast", cast, new_index, is_proven=True)
        return None

    def follow_item(self, node: ast.expr, index: int, line: int) -> Producer:
        """Continues the search at an element of a tuple or dict that a function returns. In a
        collator or dataset, an expression of an unknown dtype gave the tensor its dtype.
        """
        result = self.follow(node, index, line)
        value = read_value(node, self.frame_at(index, line))
        is_creation = result.kind == "creation" and not is_tensor(value)
        if is_creation or (index in self.item_frames and not is_tensor(value)):
            if result.kind == "unknown":
                result = self.producer("data", node, index)
            return replace(result, is_proven=True)
        return result

    def read_arguments(
        self, function: Any, call: ast.Call | None, index: int, line: int
    ) -> dict[str, Any]:
        """Returns the values of the arguments that a call passed, as far as they can be read."""
        function = _as_function(function)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if call is None or code is None:
            return {}
        names = list(code.co_varnames[: code.co_argcount])
        if isinstance(function, MethodType):
            names = names[1:]
        frame = self.frame_at(index, line)
        values = _read_defaults(function)
        for name, argument in zip(names, call.args):
            if isinstance(argument, ast.Starred):
                break
            values[name] = read_value(argument, frame)
        for keyword in call.keywords:
            if keyword.arg is not None:
                values[keyword.arg] = read_value(keyword.value, frame)
        return values

    def follow_passed_function(self, node: ast.Call, index: int, line: int) -> Producer | None:
        """Searches a function that the call passes to a function of a library, such as the lambda
        in `tree_map(lambda tensor: tensor.half(), batch)`.
        """
        frame = self.frame_at(index, line)
        for argument in node.args:
            if isinstance(argument, ast.Lambda):
                cast = find_cast(argument.body, frame, self.dtype)
                if cast is not None:
                    return self.producer("cast", cast, index, is_proven=True)
            elif isinstance(argument, (ast.Name, ast.Attribute)):
                function = read_function(argument, frame)
                if isinstance(function, (FunctionType, MethodType)):
                    result = self.follow_returned(function, None, index)
                    if result is not None:
                        return result
        return None

    def follow_name(self, node: ast.AST, name: str, index: int, line: int) -> Producer:
        frame = self.frame_at(index, line)
        scope = frame.scope
        if scope is None or (index, name) in self.earlier_names:
            return self.producer("unknown", node, index)
        if line == frame.line:
            result = self.follow_previous_layer(index)
            if result is not None:
                return result
        item = self.find_assigned_item(scope, name, index, line)
        if item is not None:
            return self.follow_item(item.value, index, item.lineno)
        appended = _find_appended(scope, name, line)
        if appended is not None:
            self.key = UNKNOWN
            return self.follow(appended, index, appended.lineno)
        if self.is_unchanged_argument(scope, name, index):
            return self.follow_argument(scope, name, node, index)
        for binding in _earlier_bindings(scope, name, line):
            if self.is_skipped(binding, scope, index) or self.has_other_dtype(binding, name, index):
                continue  # in a branch that did not run
            result = self.follow_binding(binding, name, index)
            file, _, result_line = result.location.rpartition(":")
            is_here = file == frame.location.rpartition(":")[0]
            is_here = is_here and binding.lineno <= int(result_line) <= _end_line(binding)
            is_certain = frame.is_user_code or not is_here
            is_certain = is_certain or not self.is_conditional(binding, scope, index, line)
            if result.is_proven and is_certain:
                return result
            if is_certain:
                return self.follow_earlier_pass(scope, name, index, line) or result
        repeated = self.follow_earlier_pass(scope, name, index, line)
        if repeated is not None:
            return repeated
        if isinstance(scope, ast.Module):
            return self.producer("unknown", node, index)
        if name in _parameter_names(scope):
            return self.follow_argument(scope, name, node, index)
        if name not in frame.variables and name in frame.global_variables:
            return self.follow_global(node, name, frame)
        return self.producer("unknown", node, index)

    def follow_earlier_pass(self, scope: Any, name: str, index: int, line: int) -> Producer | None:
        """Continues the search at an assignment later in the body of the same loop, which gave the
        name its value in the pass before. Returns None if this does not prove the dtype.
        """
        loops = [
            node
            for node in _walk_scope(scope)
            if isinstance(node, (ast.For, ast.While)) and node.lineno < line <= _end_line(node)
        ]
        for loop in reversed(loops):
            for binding in _walk_bindings(loop):
                if binding.lineno <= line or name not in _bound_names(binding):
                    continue
                if self.is_skipped(binding, scope, index):
                    continue
                if self.has_other_dtype(binding, name, index):
                    continue
                self.earlier_names.add((index, name))
                result = self.follow_binding(binding, name, index)
                self.earlier_names.remove((index, name))
                if result.is_proven:
                    return result
        return None

    def find_assigned_item(self, scope: Any, name: str, index: int, line: int) -> ast.Assign | None:
        """Returns the last assignment `NAME[key] = value` before a line with the wanted key."""
        if not isinstance(self.key, str):
            return None
        assignments = [
            node
            for node in _walk_scope(scope)
            if isinstance(node, ast.Assign)
            and _last_line(node) < line
            and _assigns_item(node, name, self.key)
        ]
        for node in sorted(assignments, key=lambda node: node.lineno, reverse=True):
            value = read_value(node.value, self.frame_at(index, node.lineno))
            is_other = is_tensor(value) and value.dtype != self.dtype
            if not is_other and not self.is_skipped(node, scope, index):
                return node
        return None

    def is_unchanged_argument(self, scope: Any, name: str, index: int) -> bool:
        """True if a parameter of a running function still holds the object that the caller passed.
        Assignments to the parameter are then in branches that did not run.
        """
        value = self.frames[index].variables.get(name)
        is_container = isinstance(value, (torch.Tensor, tuple, list, dict))
        if index >= self.running_count or not is_container or isinstance(scope, ast.Module):
            return False
        outer, call, _ = self.find_caller(index)
        if outer < 0 or name not in _parameter_names(scope):
            return False
        owner = self.frames[index].variables.get("self")
        is_bound = not _is_first_argument(owner, call, self.frames[outer])
        argument = _argument_expression(scope, call, name, is_bound)
        if argument is None or isinstance(argument, ast.Starred):
            return False
        return read_value(argument, self.frames[outer]) is value

    def follow_global(self, node: ast.AST, name: str, frame: CallFrame) -> Producer:
        """Continues the search at the assignment of a global variable."""
        for index, other in enumerate(self.frames):
            if isinstance(other.scope, ast.Module) and other.file == frame.file:
                return self.follow_name(node, name, index, other.line)
        module_frame = make_module_frame(frame)
        index = len(self.frames)
        if module_frame is None:
            return self.producer("unknown", node, index - 1)
        self.frames.append(module_frame)
        return self.follow_name(node, name, index, module_frame.line)

    def follow_attribute(self, node: ast.AST, name: str, index: int, owner: Any) -> Producer:
        """Continues the search at the assignment of `self.NAME` in a method of the owner's class."""
        is_unpacked = isinstance(read_value(node, self.frames[index]), (tuple, list))
        creations = []
        for binding, new_index in self.iterate_attribute_bindings(name, index, owner):
            self.element = self.key if is_unpacked and isinstance(self.key, int) else None
            result = self.follow(binding.value, new_index, binding.lineno)
            if result.is_proven:
                return result
            is_float = not _INTEGER_CREATION.match(result.text)
            if result.kind == "creation" and is_float and result.text in _source(binding.value):
                creations.append(result)
        is_stored = isinstance(read_value(node, self.frames[index]), torch.Tensor)
        if is_stored and len(creations) == 1:
            return replace(creations[0], is_proven=True)  # the only call that makes the tensor
        written = self.follow_writes(name, owner)
        if written is not None:
            return written
        return self.producer("attribute", node, index, is_proven=is_stored)

    def is_skipped(self, binding: ast.AST, scope: ast.AST, index: int) -> bool:
        """True if a statement is in a branch whose condition is false. The condition is evaluated
        with the values that the variables had at the failure, if they did not change after it.
        """
        for node in _walk_scope(scope):
            if not isinstance(node, ast.If):
                continue
            is_in_body = _contains_node(node.body, binding)
            if not is_in_body and not _contains_node(node.orelse, binding):
                continue
            holds = read_condition(node.test, self.frame_at(index, node.lineno))
            is_known = holds is not None and not _reads_changed_value(node, scope)
            if is_known and holds != is_in_body:
                return True
        return False

    def is_conditional(self, binding: ast.AST, scope: ast.AST, index: int, line: int) -> bool:
        """True if a statement is in a branch that does not contain a line, and whose condition
        cannot be read.
        """
        for node in _walk_scope(scope):
            for statements in (node.body, node.orelse) if isinstance(node, ast.If) else ():
                if not _contains_node(statements, binding):
                    continue
                if statements[0].lineno <= line <= _end_line(statements[-1]):
                    continue
                if read_condition(node.test, self.frame_at(index, node.lineno)) is None:
                    return True
        return False

    def iterate_attribute_bindings(
        self, name: str, index: int, owner: Any
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
            for binding in _attribute_bindings(frame.scope, name):
                new_index = len(self.frames)
                self.frames.append(frame)
                self.callers[new_index] = (index, None, self.frames[index].line)
                is_constructor = method is vars(type(owner)).get("__init__")
                construction = self.find_only_construction(owner) if is_constructor else None
                if construction is not None:
                    self.callers[new_index] = construction
                yield binding, new_index

    def find_only_construction(self, owner: object) -> tuple[int, ast.Call, int] | None:
        """Returns the only call in the user's files that makes objects of a class: the index of a
        frame for the function that contains it, the call, and its line.
        """
        name = type(owner).__name__
        calls = [
            (call, *source)
            for source in iterate_user_files(self.frames[: self.running_count])
            for call in ast.walk(source[1])
            if isinstance(call, ast.Call) and _source(call.func).rpartition(".")[2] == name
        ]
        if len(calls) != 1:
            return None
        call, file, tree, module_frame = calls[0]
        index = self.add_function_frame(call, tree, module_frame, file)
        return None if index is None else (index, call, call.lineno)

    def find_constructors(self, module: object, index: int) -> Iterator[tuple[ast.Call, int]]:
        """Yields the calls that were assigned to a variable, or to an attribute of `self`, whose
        value is this module or dataset. Each call comes with the index of its frame.
        """
        frame = self.frames[index]
        for name in [name for name, value in frame.variables.items() if value is module]:
            call = find_assigned_call(ast.Name(name, ast.Load()), frame)
            if call is not None:
                yield call, index
        for name in [name for name, value in frame.global_variables.items() if value is module]:
            module_frame = make_module_frame(frame)
            if module_frame is not None:
                call = find_assigned_call(ast.Name(name, ast.Load()), module_frame)
                self.frames.append(module_frame)
                if call is not None:
                    yield call, len(self.frames) - 1
        owner = frame.variables.get("self")
        stored = owner._modules if isinstance(owner, nn.Module) else {}
        stored = {**getattr(owner, "__dict__", {}), **stored}
        for name in [name for name, value in stored.items() if value is module]:
            for binding, binding_index in self.iterate_attribute_bindings(name, index, owner):
                if isinstance(binding.value, ast.Call):
                    yield binding.value, binding_index

    def follow_constructor(self, argument: ast.expr, index: int) -> Producer:
        """Continues the search at an argument of the call that created a module."""
        result = self.follow(argument, index, argument.lineno)
        location = self.frames[index].location_of(argument)
        return replace(result, passed=_source(argument), passed_at=location)

    def has_other_dtype(self, binding: Any, name: str, index: int) -> bool:
        """True if the assigned value has another dtype than `self.dtype`."""
        if not isinstance(binding, ast.Assign):
            return False
        assigned = _assigned_expression(binding, name)
        frame = self.frame_at(index, binding.lineno)
        if isinstance(assigned, ast.Call):
            dtype = read_cast_dtype(assigned, frame)
            if dtype is not None:
                return dtype != self.dtype
        value = read_value(assigned, frame)
        return is_tensor(value) and value.dtype != self.dtype

    def follow_binding(self, binding: Any, name: str, index: int) -> Producer:
        match binding:
            case ast.For() | ast.AsyncFor():
                return self.follow_loop(binding, name, index)
            case ast.AugAssign():
                return self.follow_widest([binding.value], binding.value, index, binding.lineno)
            case ast.AnnAssign(value=ast.expr() as value):
                return self.follow(value, index, binding.lineno)
        return self.follow_assignment(binding, name, index)

    def follow_collators(self) -> Producer | None:
        """Searches the collators and datasets of trainers and DataLoaders in the frames. A trainer
        reads the batch in a function that has returned, so no assignment leads to the collator.
        """
        for index in range(self.running_count):
            frame = self.frames[index]
            stored = getattr(frame.variables.get("self"), "__dict__", {})
            functions = [stored.get("data_collator")]
            for value in (*frame.variables.values(), *stored.values()):
                if isinstance(value, torch.utils.data.DataLoader):
                    functions += list(_item_functions(value))
                    calls = list(self.find_loader_calls(value, index))
                    functions += self.find_row_sources(value, calls)
            if functions[0] is not None:
                functions += list(_item_functions(stored.get("train_dataset")))
            result = self.follow_item_functions(functions, None, index, frame.line)
            if result is not None:
                return replace(result, passed="", passed_at="")
        return None

    def follow_previous_layer(self, index: int) -> Producer | None:
        """If a loop calls the layers of a model one after another, also searches the hooks of the
        previous layer, because its result is the input of the running layer.
        """
        frame = self.frames[index]
        call = frame.expression
        if index >= self.running_count or not isinstance(call, ast.Call):
            return None
        layer = read_function(call.func, frame)
        previous = self.names.previous_layer(layer) if isinstance(layer, nn.Module) else None
        for module in () if previous is None else previous.modules():
            result = self.follow_hooks(module, "forward hook", index)
            if result is not None:
                return result
        return None

    def follow_sequential_input(self, index: int) -> Producer | None:
        """Continues the search in the layer before the running one, if an `nn.Sequential` calls
        both. Functions such as `checkpoint_sequential` call the layers by an index, so that their
        frames show only the running layer.
        """
        frame = self.frames[index]
        layer = frame.variables.get("self")
        if not isinstance(layer, nn.Module) or frame.scope is None:
            return None
        inputs: list[Any] = [
            frame.variables.get(name) for name in _parameter_names(frame.scope)[1:2]
        ]
        if not any(is_tensor(value) and value.dtype == self.dtype for value in inputs):
            return None  # the layer itself computed the value
        previous = self.names.previous_sequential_layer(layer)
        if previous is None:
            return None
        path = self.names.module_path(previous)
        outer = next((i for i in range(index, -1, -1) if self.frames[i].is_user_code), index)
        forward = MethodType(type(previous).forward, previous)
        result = self.follow_hooks(previous, "forward hook", index)
        if result is None and floating_weight_dtypes(previous) == {self.dtype}:
            name = ast.Name(path, ast.Load())
            result = self.producer("module", name, outer, path=path, module=previous)
        result = result or self.follow_returned(forward, None, index)
        if result is None:
            return None
        frame_of_forward = make_returned_frame(forward, {})
        values = [] if frame_of_forward is None else list(_returned_values(frame_of_forward.scope))
        if frame_of_forward is None or len(values) != 1 or result.hook:
            return replace(result, passed="", passed_at="", is_proven=True)
        location = frame_of_forward.location_of(values[0])
        if result.kind == "module":
            result = replace(result, location=location)
        return replace(result, passed=_source(values[0]), passed_at=location, is_proven=True)

    def follow_loop(self, binding: Any, name: str, index: int) -> Producer:
        """Continues the search at the values over which a `for` loop iterates."""
        iterable = _unwrap_iterable(binding.iter)
        target = binding.target
        table = _read_table(iterable)
        if table is not None:
            self.key = UNKNOWN
            stored = self.follow(table, index, binding.lineno)
            return stored if stored.kind != "unknown" else self.producer("data", table, index)
        if isinstance(target, ast.Tuple) and iterable is not binding.iter:
            target = target.elts[-1]
        element = _position_in(target, name)
        result = self.follow_items(iterable, element, index, binding.lineno)
        return result or self.producer("data", binding.iter, index)

    def follow_next_item(self, node: ast.Call, index: int, line: int) -> Producer | None:
        """Continues the search at the iterable of `next(iterator)`."""
        iterable = _unwrap_iterable(node.args[0])
        if isinstance(iterable, ast.Name) and iterable is node.args[0]:
            call = find_assigned_call(iterable, replace(self.frames[index], line=line))
            iterable = iterable if call is None else _unwrap_iterable(call)
        element = self.element
        self.element = None
        return self.follow_items(iterable, element, index, line)

    def follow_items(
        self, iterable: ast.AST, element: int | None, index: int, line: int
    ) -> Producer | None:
        """Continues the search in the functions that make the items of an iterable: a generator, a
        collator, or the `__getitem__` of a dataset.
        """
        frame = self.frame_at(index, line)
        value = read_value(iterable, frame)
        functions = list(_item_functions(value))
        calls = [(iterable, index)] if isinstance(iterable, ast.Call) else []
        if isinstance(value, torch.utils.data.DataLoader):
            calls += list(self.find_loader_calls(value, index))
        for call, call_index in calls:
            function = read_function(call.func, self.frames[call_index])
            if isinstance(function, FunctionType):  # a generator
                self.element = element
                result = self.follow_returned(function, call, index, line)
                if result is not None:
                    return result
            result = self.follow_tensor_dataset(call, element, call_index)
            if result is not None:
                return result
            functions += list(_item_functions_of_call(call, self.frames[call_index]))
        functions += self.find_row_sources(value, calls)
        result = self.follow_item_functions(functions, element, index, line)
        if result is None and isinstance(iterable, ast.Name) and not functions:
            if element is not None:
                self.key = element
            plain = self.follow(iterable, index, line)
            return plain if plain.is_proven else None
        return result

    def follow_item_functions(
        self, functions: Sequence[Any], element: int | None, index: int, line: int
    ) -> Producer | None:
        """Continues the search at the values that a collator or a dataset returns. The first
        functions return what the later ones made.
        """
        for number, function in enumerate(functions):
            self.element = element
            self.inner_functions = functions[number + 1 :]
            if isinstance(function, RowSource):
                key = self.key if element is None else element
                result = follow_rows(self, function, key)
            else:
                result = self.follow_returned(function, None, index, line, is_item=True)
            if result is not None and result.is_proven:
                return result
        self.element = None
        return None

    def find_loader_calls(self, loader: object, index: int) -> Iterator[tuple[ast.Call, int]]:
        """Yields the calls that made a DataLoader: those of a frame, or else those of the frames
        around it.
        """
        for number in range(min(index, self.running_count - 1), -1, -1):
            calls = []
            if self.frames[number].is_user_code:
                calls = list(self.find_constructors(loader, number))
            yield from calls
            if calls:
                return

    def find_row_sources(
        self, loader: object, calls: Sequence[tuple[ast.Call, int]]
    ) -> list[RowSource]:
        """Returns the rows that a DataLoader reads. `calls` made the DataLoader."""
        sources = [find_row_source(self, call, index, loader) for call, index in calls]
        return [source for source in sources if source is not None]

    def iterate_list_values(self, name: str, index: int, line: int) -> Iterator[tuple[Any, int]]:
        """Yields the values that a function or module assigns to a name before a line, and the calls
        `NAME.append(row)`, with the index of the frame.
        """
        frame = self.frame_at(index, line)
        scope = frame.scope
        if scope is None:
            return
        for node in _walk_scope(scope):
            match node:
                case ast.Call(ast.Attribute(ast.Name(owner), "append"), [_]):
                    if owner == name and node.lineno < line:
                        yield node, index
        bindings = _earlier_bindings(scope, name, line)
        for binding in bindings:
            if isinstance(binding, ast.Assign) and not self.is_skipped(binding, scope, index):
                yield binding.value, index
        if not bindings and not isinstance(scope, ast.Module):
            if name in _parameter_names(scope):
                outer, call, _ = self.find_caller(index)
                argument = None if outer < 0 else _argument_expression(scope, call, name, True)
                if argument is not None:
                    yield argument, outer
                return
            module_frame = make_module_frame(frame)
            if module_frame is not None:
                self.frames.append(module_frame)
                yield from self.iterate_list_values(name, len(self.frames) - 1, module_frame.line)

    def iterate_results(
        self, function: Any, call: ast.Call, index: int, line: int
    ) -> Iterator[tuple[ast.expr, int]]:
        """Yields the expressions that a function of the user's code returned, with the index of a
        frame for it.
        """
        frame = make_returned_frame(function, self.read_arguments(function, call, index, line))
        if frame is None:
            return
        new_index = len(self.frames)
        self.frames.append(frame)
        self.callers[new_index] = (index, call, line)
        for value in list(_returned_values(frame.scope)):
            yield value, new_index

    def iterate_calls(self, names: Sequence[str]) -> Iterator[tuple[ast.Call, int]]:
        """Yields the calls of the user's files to methods of these names, with the index of a frame
        for the module.
        """
        for _, tree, module_frame in list(iterate_user_files(self.frames[: self.running_count])):
            for call in ast.walk(tree):
                match call:
                    case ast.Call(ast.Attribute(_, name)) if name in names:
                        self.frames.append(module_frame)
                        yield call, len(self.frames) - 1

    def follow_tensor_dataset(
        self, call: ast.Call, element: int | None, index: int
    ) -> Producer | None:
        """Continues the search at the tensor that was passed to a `TensorDataset`. `call` made the
        dataset, or a DataLoader for it.
        """
        frame = self.frames[index]
        if element is None:
            return None
        if read_function(call.func, frame) is torch.utils.data.TensorDataset:
            if element < len(call.args):
                return self.follow(call.args[element], index, call.lineno)
            return None
        for part in _iterate_arguments(call):
            if isinstance(part, ast.Call):
                return self.follow_tensor_dataset(part, element, index)
            value = read_value(part, frame)
            if isinstance(value, torch.utils.data.TensorDataset):
                for inner, inner_index in self.find_constructors(value, index):
                    return self.follow_tensor_dataset(inner, element, inner_index)
        return None

    def follow_assignment(self, binding: ast.Assign, name: str, index: int) -> Producer:
        value = _assigned_expression(binding, name)
        if value is None:
            self.key = _position_in(binding.targets[0], name)
            result = self.follow(binding.value, index, binding.lineno)
            return result if result.is_proven else self.producer("call", binding.value, index)
        if isinstance(value, ast.Call):
            self.element = _position_in(binding.targets[0], name)
            result = self.follow_call(value, index, binding.lineno)
            self.element = None
            return result
        if isinstance(value, ast.BinOp):
            # the name may stand on both sides, as in `x = x + table`
            operands = [value.left, value.right]
            operands.sort(key=lambda operand: _is_name(operand, name))
            return self.follow_widest(operands, value, index, binding.lineno)
        return self.follow(value, index, binding.lineno)

    def follow_argument(self, scope: ast.AST, name: str, node: ast.AST, index: int) -> Producer:
        """If the search has reached a parameter of a function, continues it at the argument that
        the caller passed for this parameter.
        """
        outer, call, call_line = self.find_caller(index)
        if outer < 0 or call is None:
            return self.producer("unknown", node, index)
        frame = self.frames[index]
        is_bound = not _is_first_argument(frame.variables.get("self"), call, self.frames[outer])
        argument = _argument_expression(scope, call, name, is_bound)
        value = frame.variables.get(name)
        module = frame.variables.get("self")
        passed_value = read_value(argument, self.frame_at(outer, call_line))
        is_forward = isinstance(module, nn.Module) and frame.function != "__init__"
        if isinstance(module, nn.Module) and is_forward and passed_value is not value:
            result = self.follow_hooks(module, "forward pre-hook", index)
            if result is not None:
                return result
        star = _star_argument(scope, call, name, is_bound)
        if argument is None and star is not None:
            self.key = star[1]
            return self.follow(star[0], outer, call_line)
        if argument is None or isinstance(argument, ast.Starred):
            passed = _read_starred(scope, call, name, is_bound, self.frames[outer])
            value = value if passed is UNKNOWN else passed
            return self.follow_starred(argument, name, value, node, index, outer)
        return self.follow(argument, outer, call_line)

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

    def follow_starred(
        self,
        argument: ast.Starred | None,
        name: str,
        value: Any,
        node: ast.AST,
        index: int,
        outer: int,
    ) -> Producer:
        """Continues the search if the caller passed the argument with `*` or `**`. The search goes
        outward through the frames of libraries to the first call that passes this tensor by an
        expression.
        """
        if index in self.callers or not isinstance(value, torch.Tensor):
            return self.producer("unknown", node, index)
        self.key = name
        for number in range(outer, -1, -1):
            frame = self.frames[number]
            call = frame.expression
            if frame.is_forwarding or not isinstance(call, ast.Call):
                continue
            for part in _iterate_arguments(call):
                if not isinstance(part, ast.Starred) and read_value(part, frame) is value:
                    return self.follow(part, number)
            if frame.is_user_code:
                return self.follow_user_argument(call, name, value, node, index, number)
        return self.producer("unknown", node, index)

    def follow_user_argument(
        self, call: ast.Call, name: str, value: torch.Tensor, node: ast.AST, index: int, outer: int
    ) -> Producer:
        """Continues the search at an argument of the user's call that contains the tensor, or that
        cannot be read.
        """
        frame = self.frames[outer]
        for part in _iterate_arguments(call):
            container = part.value if isinstance(part, ast.Starred) else part
            items = read_value(container, frame)
            if items is not UNKNOWN and not _contains(items, value):
                continue
            self.key = name
            is_starred = isinstance(part, ast.Starred)
            result = self.follow(container, outer)
            if not result.is_proven and (items is not UNKNOWN or is_starred):
                result = self.producer("data", container, outer)
            if is_starred:  # the user's line has no expression for the tensor alone
                result = replace(result, passed="", passed_at="")
            if result.is_proven or result.kind == "data":
                return result
        return self.producer("unknown", node, index)


def _source(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


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


def _assigns_item(node: ast.Assign, name: str, key: str) -> bool:
    match node.targets[0]:
        case ast.Subscript(ast.Name(owner), ast.Constant(value)):
            return owner == name and value == key
    return False


def _contains_node(statements: Sequence[ast.stmt], node: ast.AST) -> bool:
    line = getattr(node, "lineno", 0)
    return any(
        part is node
        for statement in statements
        if statement.lineno <= line <= _end_line(statement)
        for part in ast.walk(statement)
    )


def _read_integers(frame: CallFrame, scope: Any, line: int) -> CallFrame:
    """Returns a frame of a function that has returned with the dtypes of its local variables that
    hold integers, if the function assigns each of them once.
    """
    bindings = sorted(_walk_bindings(scope), key=lambda binding: binding.lineno)
    bound = Counter(name for binding in bindings for name in _bound_names(binding))
    for binding in bindings:
        if not isinstance(binding, ast.Assign) or _last_line(binding) >= line:
            continue
        for name in _bound_names(binding):
            assigned = _assigned_expression(binding, name)
            is_element = assigned is not binding.value or isinstance(binding.targets[0], ast.Name)
            value: Any = UNKNOWN
            if bound[name] == 1 and is_element:
                value = read_value(assigned, frame)
            if is_tensor(value) and not value.dtype.is_floating_point:
                facts = TensorFacts(value.dtype, value.device)
                frame = replace(frame, variables={**frame.variables, name: facts})
    return frame


def _reads_changed_value(branch: ast.If, scope: ast.AST) -> bool:
    """True if a comparison reads an attribute or item that the function changes, or a variable of
    a loop around it: in an earlier pass the comparison may have had another result.
    """
    if not any(isinstance(part, ast.Compare) for part in ast.walk(branch.test)):
        return False
    changed = set()
    for node in _walk_scope(scope):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed |= {_source(part) for part in targets if not isinstance(part, ast.Name)}
        elif isinstance(node, (ast.For, ast.While)) and any(
            part is branch for part in ast.walk(node)
        ):
            changed |= {name for part in _walk_bindings(node) for name in _bound_names(part)}
            changed |= _bound_names(node) if isinstance(node, ast.For) else set()
    return any(
        _source(part) in changed
        for part in ast.walk(branch.test)
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))
    )


def _may_hold_tensor(value: Any) -> bool:
    return is_tensor(value) or value is UNKNOWN or isinstance(value, (tuple, list, dict))


def _iterate_stored_tensors(owner: object, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that an object, or an object in its attributes, holds in attributes, and
    the names of these.
    """
    if isinstance(owner, (nn.Module, torch.Tensor, type)) or depth > _MAX_DEPTH:
        return
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, torch.Tensor):
                yield name, item
            else:
                yield from _iterate_stored_tensors(item, depth + 1)


def _enclosing_function(
    tree: ast.Module, node: ast.AST
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Returns the innermost function of a file that contains a node."""
    functions = [
        function
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(part is node for part in ast.walk(function))
    ]
    return max(functions, key=lambda function: function.lineno, default=None)


def _make_function_frame(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    module_frame: CallFrame,
    objects: Iterable[object],
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


def _find_stored_item(scope: ast.AST | None, node: ast.Subscript, line: int) -> ast.expr | None:
    """Returns the only value that a function assigns to `TABLE[key]` before a line that reads it
    with the same key, as a table of tensors that are made once does.
    """
    if isinstance(node.slice, ast.Constant) or scope is None:
        return None
    values = [
        binding.value
        for binding in _walk_scope(scope)
        if isinstance(binding, ast.Assign) and binding.lineno < line
        if _source(binding.targets[0]) == _source(node)
    ]
    return values[0] if len(values) == 1 else None


def _find_field(call: ast.Call, function: Any, key: Any) -> ast.expr | None:
    """Returns the value that a call gives to a field of a new object, by keyword, or by position for
    a dataclass or a named tuple.
    """
    if not isinstance(key, str):
        return None
    names = list(getattr(function, "_fields", ()))
    if isinstance(function, type) and is_dataclass(function):
        names = [field.name for field in fields(function) if field.init]
    if key in names[: len(call.args)]:
        return call.args[names.index(key)]
    return node_keyword(call, key)


def _find_appended(scope: Any, name: str, line: int) -> ast.expr | None:
    """Returns the value of the only call `NAME.append(value)` before a line."""
    values = []
    for node in _walk_scope(scope):
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), "append"), [value]):
                if owner == name and node.lineno < line:
                    values.append(value)
    return values[0] if len(values) == 1 else None


def _star_argument(
    scope: Any, call: ast.AST | None, name: str, is_bound: bool
) -> tuple[ast.expr, int] | None:
    """Returns the list that a call passes with `*`, if it contains the value of a parameter, and
    the position of the value in it.
    """
    positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if is_bound and positional[:1] in (["self"], ["cls"], ["ctx"]):
        positional.pop(0)
    if not isinstance(call, ast.Call) or name not in positional:
        return None
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            number = positional.index(name) - position
            return (argument.value, number) if number >= 0 else None
    return None


def _dtype_source(call: ast.Call) -> ast.expr | None:
    """Returns the tensor `y` of the casts `x.to(y.dtype)` and `x.type_as(y)`."""
    for argument in _arguments(call):
        match argument:
            case ast.Attribute(owner, "dtype"):
                return owner
    is_same_type = isinstance(call.func, ast.Attribute) and call.func.attr == "type_as"
    return call.args[0] if is_same_type and call.args else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _parameter_names(scope: Any) -> list[str]:
    arguments = scope.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _argument_expression(
    scope: Any, call: ast.AST | None, name: str, is_bound: bool
) -> ast.AST | None:
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
    positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if is_bound and positional[:1] in (["self"], ["cls"], ["ctx"]):
        positional.pop(0)
    if name in positional:
        position = positional.index(name)
        stars = [isinstance(argument, ast.Starred) for argument in call.args]
        if position < len(call.args) and not any(stars[: position + 1]):
            return call.args[position]
    for keyword in call.keywords:
        if keyword.arg is None:
            return ast.Starred(keyword.value)
    return None


def _read_starred(
    scope: Any, call: ast.AST | None, name: str, is_bound: bool, frame: CallFrame
) -> Any:
    """Returns the value that a call passes for a parameter with `*` or `**`, or UNKNOWN."""
    if not isinstance(call, ast.Call):
        return UNKNOWN
    for keyword in call.keywords:
        container = UNKNOWN if keyword.arg else read_value(keyword.value, frame)
        if isinstance(container, dict) and name in container:
            return container[name]
    positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    if is_bound and positional[:1] in (["self"], ["cls"], ["ctx"]):
        positional.pop(0)
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


def _is_first_argument(owner: Any, call: ast.AST | None, frame: CallFrame) -> bool:
    """True if a call passes `owner` as its first argument, as `forward(self, x)` does."""
    if owner is None or not isinstance(call, ast.Call) or not call.args:
        return False
    return read_value(call.args[0], frame) is owner


def _read_defaults(function: Any) -> dict[str, Any]:
    """Returns the default values of a function's parameters."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return {}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    values = dict(zip(reversed(names), reversed(function.__defaults__ or ())))
    return {**values, **(function.__kwdefaults__ or {})}


def _read_default(scope: Any, name: str) -> Any:
    """Returns the default value of a parameter, if it is a constant."""
    positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
    defaults = dict(zip(reversed(positional), reversed(scope.args.defaults)))
    defaults |= dict(zip([a.arg for a in scope.args.kwonlyargs], scope.args.kw_defaults))
    default = defaults.get(name)
    return default.value if isinstance(default, ast.Constant) else UNKNOWN


def _arguments(call: ast.Call) -> list[ast.expr]:
    """Returns the expressions that a call passes by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _iterate_arguments(call: ast.Call) -> Iterator[ast.expr]:
    """Yields the expressions of a call's arguments, with `**` arguments as an `ast.Starred`."""
    yield from call.args
    for keyword in call.keywords:
        yield keyword.value if keyword.arg else ast.Starred(keyword.value)


def _contains(container: Any, tensor: torch.Tensor) -> bool:
    data = getattr(container, "data", container)  # BatchEncoding of transformers
    if isinstance(data, dict):
        return any(item is tensor for item in data.values())
    return isinstance(data, (list, tuple)) and any(item is tensor for item in data)


def _as_function(value: Any) -> Any:
    """Returns the method `__call__` of an object of a class in the user's code, and other values
    unchanged.
    """
    if isinstance(value, (FunctionType, MethodType, type, nn.Module)):
        return value
    method = vars(type(value)).get("__call__")
    return MethodType(method, value) if isinstance(method, FunctionType) else value


def _item_functions(value: Any) -> Iterator[Any]:
    """Yields the functions that make the items of a DataLoader or dataset. A class of the user's
    code stands for its objects.
    """
    if isinstance(value, torch.utils.data.DataLoader):
        yield value.collate_fn
        value = value.dataset
    while isinstance(value, torch.utils.data.Subset):
        value = value.dataset
    for name in ("__getitem__", "__iter__"):
        if isinstance(value, type):
            yield getattr(value, name, None)
        else:
            method = getattr(type(value), name, None)
            if isinstance(method, FunctionType):
                yield MethodType(method, value)


def _item_functions_of_call(call: ast.Call, frame: CallFrame) -> Iterator[Any]:
    """Yields the functions that make the items of the DataLoader that a call created. The arguments
    of the call may create its dataset.
    """
    collator = node_keyword(call, "collate_fn")
    if collator is not None:
        yield _as_function(read_function(collator, frame))
    for part in _iterate_arguments(call):
        if part is collator:
            continue
        if isinstance(part, ast.Call):  # as in `DataLoader(Table(path))`
            value = read_function(part.func, frame)
            if isinstance(value, type):
                yield from _item_functions(value)
        elif isinstance(part, (ast.Name, ast.Attribute)):
            yield from _item_functions(read_value(part, frame))


def _unwrap_iterable(iterable: ast.AST) -> ast.AST:
    """Returns the iterable inside of `enumerate`, `tqdm`, `iter` and others."""
    while isinstance(iterable, ast.Call) and iterable.args:
        if _source(iterable.func).rpartition(".")[2] not in _ITERATION_WRAPPERS:
            break
        iterable = iterable.args[0]
    return iterable


def _read_table(iterable: ast.AST) -> ast.expr | None:
    """Returns the dict of `for name, tensor in tensors.items()` and of `tensors.values()`."""
    match iterable:
        case ast.Call(ast.Attribute(table, "items" | "values"), [], []):
            return table
    return None


def _returned_values(scope: Any) -> Iterator[ast.expr]:
    """Yields the expressions that a function returns or yields. The last one comes first."""
    if isinstance(scope, ast.Lambda):
        yield scope.body
        return
    nodes = [
        node
        for node in _walk_scope(scope)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value
    ]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        assert node.value is not None
        yield node.value


def _code_of_result(scope: Any, values: Sequence[ast.expr]) -> Iterator[ast.AST]:
    """Yields the expressions that a function returns, and the assignments to variables in them. A
    cast elsewhere in the function, for example for a log, does not change the result.
    """
    yield from values
    names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    for binding in _walk_bindings(scope):
        if isinstance(binding, ast.Assign) and names & _bound_names(binding):
            yield binding


def _attribute_bindings(scope: Any, name: str) -> Iterator[ast.Assign]:
    """Yields the assignments `self.NAME = ...` in a method. An assignment of a tuple to several
    attributes counts as one of each element.
    """
    for node in _walk_scope(scope):
        if not isinstance(node, ast.Assign):
            continue
        pairs = [(node.targets[0], node.value)]
        match node.targets[0], node.value:
            case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
                pairs = list(zip(targets, values))
        for target, value in pairs:
            if ast.unparse(target) == f"self.{name}":
                yield ast.copy_location(ast.Assign([target], value), node)


def _walk_scope(scope: ast.AST) -> Iterator[Any]:
    """Yields the nodes of a function or module, without those of the functions that it defines."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _walk_scope(node)


def _walk_bindings(scope: ast.AST) -> Iterator[Any]:
    """Yields the statements of a function or module that assign a value to a name."""
    for node in _walk_scope(scope):
        is_assignment = isinstance(node, (ast.Assign, ast.AugAssign)) or (
            isinstance(node, ast.AnnAssign) and node.value is not None
        )
        if is_assignment or isinstance(node, (ast.For, ast.AsyncFor)):
            yield node


def _end_line(node: Any) -> int:
    return int(node.end_lineno)


def _last_line(binding: Any) -> int:
    """Returns the last line of an assignment, or the first line of a `for` loop."""
    if isinstance(binding, (ast.For, ast.AsyncFor)):
        return int(binding.lineno)
    return int(binding.end_lineno)


def _earlier_bindings(scope: ast.AST, name: str, line: int) -> list[Any]:
    """Searches the code before a line for statements that assign a value to a name. The last of
    these statements is returned first. A `for` loop that assigns the name counts too, even if the
    line is inside the loop.
    """
    bindings = [
        binding
        for binding in _walk_bindings(scope)
        if _last_line(binding) < line and name in _bound_names(binding)
    ]
    return sorted(bindings, key=lambda binding: binding.lineno, reverse=True)


def _bound_names(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _position_in(target: ast.AST, name: str) -> int | None:
    """Returns the position of a name in the tuple to which a value is assigned, or None."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
    return names.index(name) if name in names else None
