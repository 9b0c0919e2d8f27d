"""Collects information about one exception from its stack frames, which still hold their variables.
This information is the operands of the expression that failed, the module, the autocast state, and
the precision settings.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...dtypes import format_dtype
from ...observe.origin import is_library_file
from .autocast import AutocastState, find_other_region, read_autocast_state
from .checks import fails_for_other_reason, find_check_operands
from .compiled import run_without_compiler
from .expressions import UNKNOWN, TensorFacts, is_tensor, read_value
from .frames import CallFrame, collect_frames, iterate_causes, source_text
from .mixed_weights import NEEDS_ONE_DTYPE
from .modules import ModelNames
from .producer import Producer
from .producers import find_producer
from .recomputation import read_autocast_with_cache
from .recorded_calls import (
    confirm_producer,
    correct_autocast,
    find_failed_call,
    find_recorded_producer,
    match_arguments,
)
from .settings import OptimizerFacts, Setting, collect_settings, find_optimizer
from .weight_record import RECORD

if TYPE_CHECKING:
    from .tensor_record import FailedCall

MENTIONS_DTYPE = re.compile(
    r"dtype|scalar ?type|\bdata ?type|BFloat16|\bHalf\b|\bFloat\b|\bDouble\b|float(16|32|64)|FP16"
    r"|\b(fp|bf)(16|32)\b|not implemented for '|without overflow|floating|result type|Float8"
    r"|CheckpointError|low precision|must be long|complex dtype|complex types|boolean|bool tensor|BoolTensor"
    r"|LongTensor|Integral inputs|Integers to negative integer powers|only integer tensors",
    re.IGNORECASE,
)
# the second run of a selective checkpoint does a cast that its forward did not do
MISSES_CAST = re.compile(r"aten\._to_copy\.\w+ .*during backward but not found in storage")
# messages of oneDNN, which also appear for operands of different dtypes
_HIDES_DTYPE = re.compile("could not create a primitive")
# messages of NumPy about a dtype of torch, or about the name of a dtype that NumPy does not have
NUMPY_DTYPE = re.compile(
    r"(?:Cannot interpret|data type) '(?:torch\.(?=\w)|(?=bfloat16'|float8_))(?P<name>\w+)'"
    r" (?:as a data type|not understood)"
)
# messages of PyTorch about an array of NumPy
UNCONVERTIBLE_ARRAY = re.compile(r"can't convert np\.ndarray of type (?:\w+\.)*(?P<name>\w+)\.")
# words of messages about the other properties of tensors
_OTHER_SUBJECTS = re.compile(
    r"out of memory|shapes? (?:of|cannot|mismatch)|same device|No such file"
)
# messages of checks that concern the dtype or another property
_SEVERAL_SUBJECTS = re.compile(
    r"(?i)d?types? ?(?:or|and|,|/) ?(?:shape|size|device)|(?:shape|size|device)s? ?(?:or|and|,|/) ?d?type"
)
# the types of tensors in messages such as `[torch.cuda.HalfTensor [8]] is at version 2`
_TENSOR_TYPE = re.compile(
    r"\b(?:torch\.(?:\w+\.)*(?P<class>\w+)Tensor|(?:CPU|CUDA|XPU|HIP|MPS|Meta)(?P<type>\w+)Type)\b"
)
# the parts of a message that list what a function accepts
_SIGNATURES = re.compile(r"but expected (?:one of|\().*", re.DOTALL)
# numbers of Python in the messages of a TypeError, such as `must be Tensor, not float`
_PYTHON_NUMBER = re.compile(r"'float'|\b(?:not|found element of type|found type) float\b")
# names of dtypes in messages such as `self (Float) and source (BFloat16)`
_SCALAR_TYPES = {
    "Float": torch.float32,
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
    "Double": torch.float64,
}
# names of dtypes in messages such as `got: c10::BFloat16 != float`
# and `expected dtype c10::Half for `weight` but got dtype float`
_CPP_TYPES = re.compile(
    r"(?:got: |expected dtype )(?:c10::)?(\w+) (?:!= |for `\w+` but got dtype )(?:c10::)?(\w+)"
)
_CPP_NAMES = {"float": torch.float32, "double": torch.float64}
_SCRIPT_ERROR = "failed in the TorchScript interpreter"
_RENAMING_FILE = os.path.join("torch", "functional.py")
_MAX_OPERANDS = 8  # operands of one operation that are examined


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A tensor that the failing expression received.

    label        the source text of the operand
    path         the path of the parameter or buffer; "" if the operand is neither
    frame_index  the index of the frame that failed
    node         the syntax tree of the operand
    weight       the parameter or buffer to which the operand belongs, or None
    storage      how the tensor is stored, such as `Params4bit that widens to bf16`; None for a
                 plain tensor
    list_name    the list of tensors that contains the operand; "" if no list does
    """

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None
    device: torch.device
    path: str
    frame_index: int
    node: ast.AST
    tensor: torch.Tensor | None
    weight: torch.Tensor | None = None
    storage: str | None = None
    list_name: str = ""

    @property
    def dtype_name(self) -> str:
        return format_dtype(self.dtype)

    @property
    def _role(self) -> str:
        if not isinstance(self.weight, nn.Parameter):
            return "buffer"
        return "trained parameter" if self.weight.requires_grad else "frozen parameter"

    def describe(self) -> str:
        shape = "" if self.shape is None else f"[{' '.join(map(str, self.shape))}]"
        parts = [f"{self.dtype_name}{shape}"]
        if self.device.type != "cpu":
            parts.append(f"on {self.device}")
        if self.path:
            parts.append(f"{self._role} {self.path}")
        if self.storage is not None:
            parts.append(self.storage)
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The facts about one exception.

    error              the exception that was raised first
    operation          the name of the function or operator that failed
    user_frame         the innermost frame of the user's own code
    module             the innermost module that was running
    model              the outermost module that was running; a hook may run a module outside of it
    in_backward        whether autograd was running
    settings           the settings of the run that were found in the frames
    producers          id of an operand -> the place where its dtype was decided
    compiled_location  the file and line of the user's code that `torch.compile` traced
    runs_eagerly       whether the call of compiled code raised no error without the compiler
    has_forward_line   whether the line of the operator that failed in backward is known
    """

    error: BaseException
    frames: Sequence[CallFrame]
    names: ModelNames
    operation: str
    operands: Sequence[Operand]
    user_frame: CallFrame
    module: nn.Module | None
    in_backward: bool
    autocast: AutocastState
    other_region: AutocastState | None
    settings: Sequence[Setting]
    optimizer: OptimizerFacts | None
    producers: dict[int, Producer] = field(default_factory=dict)
    compiled_location: tuple[str, int] | None = None
    runs_eagerly: bool = False
    has_forward_line: bool = False
    model: nn.Module | None = None

    @property
    def message(self) -> str:
        return str(self.error)

    @property
    def failing_frame(self) -> CallFrame:
        return self.frames[-1]

    @property
    def module_path(self) -> str:
        return "" if self.module is None else self.names.module_path(self.module)

    @property
    def device(self) -> str:
        return self.operands[0].device.type if self.operands else "cpu"

    @property
    def floating_dtypes(self) -> set[torch.dtype]:
        return {operand.dtype for operand in self.operands if operand.dtype.is_floating_point}

    @property
    def dtype_counts(self) -> Counter[torch.dtype]:
        """The number of elements of the parameters by dtype, of the model that was running."""
        return self.names.dtype_counts_of(self.model)

    @property
    def majority_dtype(self) -> torch.dtype | None:
        """The floating-point dtype that most of the parameter elements have."""
        return self.names.majority_dtype(self.model)

    def floating_share(self, dtype: torch.dtype) -> float:
        """Returns the share of the floating-point parameter elements that have the given dtype."""
        counts = {key: n for key, n in self.dtype_counts.items() if key.is_floating_point}
        return counts[dtype] / sum(counts.values()) if dtype in counts else 0.0

    def producer_of(self, operand: Operand) -> Producer:
        key = id(operand)
        if key not in self.producers:
            producer = find_producer(
                operand.node, self.frames, operand.frame_index, operand.dtype, self.names
            )
            if operand.tensor is not None and not operand.path:
                recorded = find_recorded_producer(operand.tensor, self.frames, self.names)
                if recorded is not None:
                    producer = confirm_producer(producer, recorded, operand.tensor)
            self.producers[key] = producer
        return self.producers[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns the collected information in a form that can be written as JSON."""
        return {
            "error": f"{type(self.error).__name__}: {self.message}",
            "operation": self.operation,
            "module": self.module_path,
            "in_backward": self.in_backward,
            "operands": {operand.label: operand.describe() for operand in self.operands},
            "producers": {
                operand.label: {
                    "kind": producer.kind,
                    "text": producer.text,
                    "location": producer.location,
                }
                for operand in self.operands
                if (producer := self.producers.get(id(operand))) is not None
            },
            "autocast": describe_autocast(self.autocast),
            "default_dtype": format_dtype(torch.get_default_dtype()),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "parameters": {
                format_dtype(dtype): count for dtype, count in self.dtype_counts.items()
            },
            "settings": {setting.name: setting.value for setting in self.settings},
            "optimizer": None if self.optimizer is None else str(self.optimizer),
            "torch": torch.__version__,
        }


def describe_autocast(state: AutocastState) -> str:
    if state.lost_at:
        return f"off in this thread, on at {state.lost_at}"
    if state.is_on is None:
        return f"not known, {state.location} decides"
    if not state.is_on:
        if state.unused_at:
            return f"off; {state.unused_at} switches it on for {state.unused_device} only"
        return f"off, switched off at {state.location}" if state.location else "off"
    dtype = "" if state.dtype is None else f", {format_dtype(state.dtype)}"
    return f"on{dtype}, since {state.location}"


def collect_evidence(error: BaseException) -> Evidence | None:
    """Collects the information about an exception. Returns None if neither the exception nor one of
    its causes is about dtypes.
    """
    causes = [cause for cause in iterate_causes(error) if _is_about_dtypes(cause)]
    # the record of all tensors ends where code is compiled
    is_compiled = bool(causes) and not RECORD.is_complete
    second = run_without_compiler(error) if is_compiled else None
    runs_eagerly = second is not None and second.error is None
    if second is not None and second.error is not None and _mentions_dtype(second.error):
        evidence = _build_evidence(second.error, second.frames)
        if _concerns_torch(evidence):
            return evidence
    for cause in causes:
        frames = collect_frames(cause)
        if frames:
            evidence = _build_evidence(cause, frames)
            location = _compiled_location(error)
            evidence = replace(evidence, compiled_location=location, runs_eagerly=runs_eagerly)
            if _needs_different_dtypes(cause) and len(evidence.floating_dtypes) < 2:
                continue
            if fails_for_other_reason(frames[-1]):
                continue
            is_missed = MISSES_CAST.search(evidence.message) is not None
            if is_missed and read_autocast_with_cache(frames) is None:
                continue  # such as a copy to another device
            if _concerns_torch(evidence):
                return evidence
    return None


def _is_about_dtypes(error: BaseException) -> bool:
    """True if an error names a dtype, or if a check of dtypes raised it. The message of a check may
    say nothing, as that of `assert x.dtype == y.dtype`.
    """
    if _mentions_dtype(error) or read_missing_dtype(error) is not None:
        return True
    frames = collect_frames(error)
    return bool(frames) and bool(find_check_operands(frames))


def read_missing_dtype(error: BaseException) -> torch.dtype | None:
    """Returns the dtype that is not in a dict, for the KeyError of `TABLE[x.dtype]`."""
    if not isinstance(error, KeyError) or len(error.args) != 1:
        return None
    return error.args[0] if isinstance(error.args[0], torch.dtype) else None


def _mentions_dtype(error: BaseException) -> bool:
    text = _SIGNATURES.sub("", f"{type(error).__name__}: {error}")
    if isinstance(error, TypeError):
        text = _PYTHON_NUMBER.sub("", text)
    types = {match["class"] or match["type"] for match in _TENSOR_TYPE.finditer(text)}
    if len(types) > 1:
        return _OTHER_SUBJECTS.search(text) is None
    text = _TENSOR_TYPE.sub("", text)  # a single type only describes a tensor
    patterns = (MENTIONS_DTYPE, _HIDES_DTYPE, MISSES_CAST)
    is_about_dtypes = next(filter(None, (pattern.search(text) for pattern in patterns)), None)
    return is_about_dtypes is not None and _OTHER_SUBJECTS.search(text) is None


def _needs_different_dtypes(error: BaseException) -> bool:
    """True for a message that may also concern another property than the dtype."""
    text = str(error)
    return bool(_HIDES_DTYPE.search(text) or _SEVERAL_SUBJECTS.search(text))


def _compiled_location(error: BaseException) -> tuple[str, int] | None:
    """Returns the innermost line of the user's code that a message of `torch.compile` names."""
    _, _, user_code = str(error).partition("from user code:")
    matches = re.findall(r'File "([^"]+)", line (\d+), in', user_code)
    locations = [(file, int(line)) for file, line in matches if not is_library_file(file)]
    return locations[-1] if locations else None


def _concerns_torch(evidence: Evidence) -> bool:
    """True if the operation that failed used tensors. Other errors are not explained."""
    is_torch_file = "/torch/" in evidence.failing_frame.file.replace("\\", "/")
    message = evidence.message
    patterns = (NUMPY_DTYPE, UNCONVERTIBLE_ARRAY)
    is_conversion = any(pattern.search(message) for pattern in patterns)
    is_conversion = is_conversion or "unsupported ScalarType" in message  # to NumPy
    is_about_weights = NEEDS_ONE_DTYPE.search(message) and evidence.names.roots
    is_missing = read_missing_dtype(evidence.error) is not None
    if is_conversion or is_missing or is_about_weights or evidence.in_backward:
        return True
    return bool(evidence.operands) or is_torch_file


def _build_evidence(error: BaseException, frames: Sequence[CallFrame]) -> Evidence:
    names = ModelNames(frames)
    failed_call = find_failed_call(error)
    operation, operands = _read_operands(str(error), frames, names, failed_call)
    operands.extend(list(_read_computed_operand(str(error), operands, frames, names)))
    device = operands[0].device.type if operands else ""
    user_frames = [f for f in frames if f.is_user_code and not f.is_compiled_entry]
    owners = [frame.variables.get("self") for frame in frames]
    modules = [
        owner
        for owner in owners
        if isinstance(owner, nn.Module) and type(owner).__name__ != "GraphModule"
    ]
    if _SCRIPT_ERROR in str(error) and modules:
        operands.extend(_read_script_weight(str(error), modules[-1], names))
    return Evidence(
        error=error,
        frames=frames,
        names=names,
        operation=operation,
        operands=operands,
        user_frame=user_frames[-1] if user_frames else frames[-1],
        module=modules[-1] if modules else None,
        in_backward=any(frame.function == "_engine_run_backward" for frame in frames),
        autocast=correct_autocast(read_autocast_state(frames, device), failed_call, device),
        other_region=find_other_region(frames, modules[0] if modules else None),
        settings=collect_settings(frames),
        optimizer=find_optimizer(frames),
        model=modules[0] if modules else None,
    )


def _read_script_weight(message: str, module: nn.Module, names: ModelNames) -> Iterator[Operand]:
    """Yields the first weight of a module of TorchScript, if all its weights have one dtype, which
    the message names. The interpreter of TorchScript has no Python frames. If several layers have
    weights, it is not known which of them failed, and the weight stands for the whole module.
    """
    weights = [item for item in module.named_parameters() if item[1].is_floating_point()]
    dtypes = {weight.dtype for _, weight in weights}
    if len(dtypes) != 1 or not dtypes <= _read_dtypes(message):
        return
    name, weight = weights[0]
    path = names.module_path(module)
    if len({name.rpartition(".")[0] for name, _ in weights}) == 1:
        path = f"{path}.{name}"
    shape, device = tuple(weight.shape), weight.device
    yield Operand(name, weight.dtype, shape, device, path, 0, ast.Name(name), weight, weight)


def _read_operands(
    message: str,
    frames: Sequence[CallFrame],
    names: ModelNames,
    failed_call: FailedCall | None,
) -> tuple[str, list[Operand]]:
    """Returns the operation that failed, and its tensors. If the innermost expression contains no
    tensor that can be read, and the message names one dtype, the operand is the value that the
    expression computes, such as `self.inp(x)`. Otherwise the arguments of the function around it are used. If these contain no tensor, the
    arguments of that function's callers are used.
    """
    last = _innermost_named_call(frames)
    compared = find_check_operands(frames[: last + 1])
    if compared:
        operands = [
            operand
            for node, index in compared
            for operand in _make_operands([node], index, frames[index], names)
        ]
        return _name_check(frames[last]), operands[:_MAX_OPERANDS]
    for index in reversed(range(last + 1)):
        frame = frames[index]
        node = frame.expression
        received: Sequence[Any] = ()
        if index == last:
            operation, nodes = _split_expression(node, frame)
            if failed_call is not None:
                nodes, received = match_arguments(failed_call, frame, nodes)
        else:
            operation, nodes = frame.function, []
        operands = list(_make_operands(nodes, index, frame, names, received))
        if not operands and index == len(frames) - 1:
            operands = _make_computed_operands(message, nodes, index, frame, names)
        if not operands:
            operation = frame.function
            arguments = [ast.Name(name, ast.Load()) for name in _argument_names(frame)]
            operands = list(_make_operands(arguments, index, frame, names))
        if operands:
            return operation, operands[:_MAX_OPERANDS]
        if frame.is_user_code:
            break
    return frames[-1].function, []


def _name_check(frame: CallFrame) -> str:
    return "the check" if frame.function == "<module>" else f"the check in {frame.function}"


def _read_computed_operand(
    message: str, operands: Sequence[Operand], frames: Sequence[CallFrame], names: ModelNames
) -> Iterator[Operand]:
    """Yields the one operand that is computed in the failing expression, such as `expert(x)`. If
    the message names two dtypes, and all other operands have one of them, this operand has the
    other.
    """
    index = len(frames) - 1
    dtypes = {operand.dtype for operand in operands if operand.dtype.is_floating_point}
    mentioned = _read_dtypes(message)
    if len(dtypes) != 1 or len(mentioned) != 2 or not dtypes < mentioned:
        return
    if any(operand.frame_index != index for operand in operands):
        return
    _, nodes = _split_expression(frames[index].expression, frames[index])
    unread = [node for node in nodes if read_value(node, frames[index]) is UNKNOWN]
    if len(unread) == 1 and isinstance(unread[0], (ast.Call, ast.BinOp)):
        label = source_text(unread[0])
        dtype = next(iter(mentioned - dtypes))
        facts = TensorFacts(dtype, operands[0].device)
        yield _make_operand(label, facts, unread[0], index, names)


def _make_computed_operands(
    message: str, nodes: Sequence[ast.AST], index: int, frame: CallFrame, names: ModelNames
) -> list[Operand]:
    """Returns the first operand that a call or an operator computes in the failing expression, with
    the only dtype that the message names.
    """
    computed = [node for node in nodes if isinstance(node, (ast.Call, ast.BinOp))]
    computed = [node for node in computed if read_value(node, frame) is UNKNOWN]
    dtypes = _read_dtypes(message)
    if not computed or len(dtypes) != 1:
        return []
    label = source_text(computed[0])
    facts = TensorFacts(next(iter(dtypes)), torch.device("cpu"))
    return [_make_operand(label, facts, computed[0], index, names)]


def _read_dtypes(message: str) -> set[torch.dtype]:
    """Returns the floating-point dtypes that a message of torch names."""
    dtypes = {_SCALAR_TYPES[name] for name in re.findall(r"\w+", message) if name in _SCALAR_TYPES}
    names = [name for match in _CPP_TYPES.finditer(message) for name in match.groups()]
    return dtypes | {_CPP_NAMES[name] for name in names if name in _CPP_NAMES}


def _innermost_named_call(frames: Sequence[CallFrame]) -> int:
    """Returns the index of the innermost frame outside of `torch/functional.py`. Functions in this
    file, such as `einsum`, give the user's tensors other names.
    """
    last = len(frames) - 1
    while last > 0 and frames[last].file.endswith(_RENAMING_FILE):
        last -= 1
    return last


def _argument_names(frame: CallFrame) -> list[str]:
    code = frame.code
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _split_expression(node: ast.AST | None, frame: CallFrame) -> tuple[str, list[ast.AST]]:
    """Returns the name of the operation, and the expressions of its operands."""
    statement = frame.statement
    match node:
        case ast.Call(function, arguments, keywords):
            nodes: list[ast.AST] = [*arguments, *(keyword.value for keyword in keywords)]
            if isinstance(function, ast.Attribute):
                if is_tensor(read_value(function.value, frame)):
                    nodes.insert(0, function.value)
                return function.attr, nodes
            return ast.unparse(function), nodes
        case ast.BinOp(left, operator, right):
            return _operator_name(operator), [left, right]
        case ast.UnaryOp(operator, operand):
            return _operator_name(operator), [operand]
        case ast.AugAssign(target, operator, value):
            return f"in-place {_operator_name(operator)}", [target, value]
        case ast.Attribute(owner, "grad") if _is_assigned(node, statement):
            return "assignment of .grad", [owner, statement.value]  # type: ignore[union-attr]
        case ast.Subscript(container, index) if _is_assigned(node, statement):
            return "index_put", [container, statement.value, index]  # type: ignore[union-attr]
        case ast.Subscript(container, index):
            return "index", [container, index]
        case ast.Assign(_, value) | ast.Return(value) | ast.Expr(value) if value is not None:
            return _split_expression(value, frame)
    return frame.function, []


def _operator_name(operator: ast.operator | ast.unaryop) -> str:
    return {"MatMult": "matmul", "Mult": "mul", "USub": "neg"}.get(
        type(operator).__name__, type(operator).__name__.lower()
    )


def _is_assigned(node: ast.AST, statement: ast.stmt | None) -> bool:
    return isinstance(statement, ast.Assign) and any(
        part is node for target in statement.targets for part in ast.walk(target)
    )


def _make_operands(
    nodes: Sequence[ast.AST],
    index: int,
    frame: CallFrame,
    names: ModelNames,
    received: Sequence[Any] = (),
) -> Iterator[Operand]:
    """Yields the tensors among the values of expressions.

    received  the recorded values of the expressions. Those that no variable holds come last
    """
    values = [(node, read_value(node, frame)) for node in nodes]
    computed = [
        (node, value)
        for node, value in zip(nodes, received)
        if isinstance(value, torch.Tensor) and read_value(node, frame) is not value
    ]
    computed_nodes = [node for node, _ in computed]
    values = [(node, value) for node, value in values if node not in computed_nodes]
    for node, value in [*values, *computed]:
        label = source_text(node)
        if is_tensor(value):
            yield _make_operand(label, value, node, index, names)
        elif isinstance(value, (list, tuple)):
            for position, item in enumerate(value[:_MAX_OPERANDS]):
                if is_tensor(item):
                    item_node = _item_node(node, position)
                    operand = _make_operand(f"{label}[{position}]", item, item_node, index, names)
                    yield replace(operand, list_name=label)


def _item_node(node: ast.AST, position: int) -> ast.AST:
    if isinstance(node, (ast.List, ast.Tuple)) and position < len(node.elts):
        return node.elts[position]
    item = ast.Subscript(node, ast.Constant(position), ast.Load())  # type: ignore[arg-type]
    return ast.copy_location(item, node)


def _make_operand(
    label: str,
    value: torch.Tensor | TensorFacts,
    node: ast.AST,
    index: int,
    names: ModelNames,
) -> Operand:
    tensor = value if isinstance(value, torch.Tensor) else None
    shape = None if tensor is None else tuple(tensor.shape)
    path = names.tensor_path(tensor) or ""
    weight = names.find_tensor(tensor)
    if weight is None and isinstance(tensor, nn.Parameter):
        weight = tensor  # of a model that no variable holds
    return Operand(
        label, value.dtype, shape, value.device, path, index, node, tensor, weight, _storage(tensor)
    )


def _storage(tensor: torch.Tensor | None) -> str | None:
    """Describes how a tensor of a subclass is stored. For a quantised weight of bitsandbytes, the
    text is its class and the dtype in which it computes. For other subclasses, the text is the name
    of the class.
    """
    if tensor is None or type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    state = getattr(tensor, "__dict__", {}).get("quant_state")
    dtype = getattr(state, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return f"{type(tensor).__name__} that widens to {format_dtype(dtype)}"
    return type(tensor).__name__
