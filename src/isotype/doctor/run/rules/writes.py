"""Recognises values that are written into a tensor of another dtype."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....dtypes import format_dtype
from ....finding import Finding
from ..bindings import find_earlier_bindings
from ..evidence import Evidence, Operand
from ..expressions import is_tensor, read_value
from ..frames import CallFrame, source_text
from ..model_casts import find_state_cast
from ..operand_origins import find_operand_origin
from ..producer import Producer
from ..recorded_origins import find_state_load
from ..storages import StorageCreation, find_storage_creation
from .findings import make_finding
from .operands import (
    add_brackets,
    find_module_origin,
    find_setting,
    is_in_user_file,
    list_floating,
    rebuild_creation,
)

_WRITING_OPERATIONS = frozenset(
    ("index_put", "index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
    + ("index_add", "index_copy", "scatter", "scatter_add", "masked_scatter", "masked_scatter_")
    + ("scatter_reduce_", "scatter_reduce", "index_reduce_", "index_reduce")
)
_OVERWRITING_OPERATIONS = frozenset(
    ("index_put", "index_put_", "index_copy_", "scatter_", "masked_scatter_")
)
# functions whose result has the default dtype if they get no dtype
_CREATIONS = frozenset(f"torch.{name}" for name in ("zeros", "ones", "empty", "rand", "randn"))


def _is_in_place(operation: str) -> bool:
    """True for an operator such as `add_`, and not for "the check in __init__"."""
    return operation.endswith("_") and not operation.startswith("__") and " " not in operation


def find_write(evidence: Evidence) -> Finding | None:
    operands = evidence.operands
    operation = evidence.operation
    has_out = "out tensor to have dtype" in evidence.message
    is_writing = operation in _WRITING_OPERATIONS or _is_in_place(operation)
    if not operands or not (is_writing or has_out):
        return None
    destination = operands[-1] if has_out else operands[0]
    values = [
        operand
        for operand in list_floating(evidence)
        if operand is not destination and operand.dtype != destination.dtype
    ]
    if not values:
        return None
    maker = evidence.producer_of(values[0])
    source = evidence.producer_of(destination)
    origin = find_module_origin(evidence, maker, values[0].dtype)
    is_explicit = maker.is_proven and maker.kind in ("cast", "creation", "parameter")
    is_autocast = evidence.autocast.is_on and evidence.autocast.dtype in (None, values[0].dtype)
    is_autocast = is_autocast and not is_explicit
    labels = dict.fromkeys(_cast_text(operand, destination) for operand in values)
    setting = _describe_write_setting(evidence, maker, values[0].dtype, destination.dtype)
    if has_out:
        setting = _describe_write_setting(evidence, source, destination.dtype, values[0].dtype)
    creation = _find_creation(evidence, destination, source, values[0].dtype)
    loading = find_operand_origin(evidence, destination)
    if loading is not None and loading.kind != "assignment":
        loading = None
    return make_finding(
        "RN008",
        evidence,
        loading="" if loading is None else loading.text,
        loading_at="" if loading is None else loading.location,
        creation="" if creation is None else creation.text,
        creation_at="" if creation is None else creation.location,
        is_code=creation is not None and creation.text.endswith(f"dtype={values[0].dtype})"),
        majority=values[0].dtype,
        autocast=bool(is_autocast),
        source=source.text if source.text != destination.label else "",
        source_at=source.location,
        operation=operation,
        destination=add_brackets(destination.label),
        destination_dtype=destination.dtype_name,
        value=add_brackets(values[0].label),
        value_dtype=values[0].dtype_name,
        casts=" and ".join(labels),
        origin=""
        if origin is None
        else origin.describe(f"the weights of {maker.path}", values[0].dtype_name),
        maker=maker.text,
        maker_at=maker.location,
        at=evidence.failing_frame.location,
        **_describe_library_write(evidence, destination),
        **_describe_written_cast(evidence, maker, destination),
        **_describe_loaded_state(evidence, destination),
        **_describe_later_writes(evidence.failing_frame, creation, values[0].dtype),
        **setting,
        out=has_out,
        copied=_copy_result(evidence, destination),
        out_at=source.location if source.text != destination.label else "",
    )


def _copy_result(evidence: Evidence, destination: Operand) -> str:
    """Returns the source code of a call without `out=`, whose result is copied into this tensor and
    so cast, or "" for a call without `out=`, for a line of a library and for operands of several dtypes.
    """
    frame = evidence.failing_frame
    call = frame.expression
    inputs = {o.dtype for o in list_floating(evidence) if o is not destination}
    if not isinstance(call, ast.Call) or not frame.is_user_code or len(inputs) > 1:
        return ""
    outputs = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
    keywords = [keyword for keyword in call.keywords if keyword.arg != "out"]
    if len(outputs) != 1:
        return ""
    code = ast.unparse(ast.Call(call.func, call.args, keywords))
    return f"{add_brackets(ast.unparse(outputs[0]))}.copy_({code})"


def _describe_write_setting(
    evidence: Evidence, producer: Producer, dtype: torch.dtype, wanted_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the line that set the dtype of an operand, and its fix if the model's weights have
    the other dtype.
    """
    setting = find_setting(evidence, producer, dtype, wanted_dtype)
    if setting is None:
        return {}
    is_odd = wanted_dtype == evidence.majority_dtype
    return {"set_by": setting.describe(), "set_fix": setting.fix if is_odd else ""}


def _find_creation(
    evidence: Evidence, destination: Operand, source: Producer, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the code that creates the destination of a write, if the fix is to create it in the
    dtype of the value.
    """
    storage = _find_odd_storage(evidence, destination, dtype)
    if storage is not None:
        return storage
    return _find_odd_destination(evidence, destination, source, dtype)


def _find_odd_storage(
    evidence: Evidence, destination: Operand, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the code that creates the destination of a write, if it is an attribute, such as a
    cache, and if all weights of the model have the dtype of the value.
    """
    frame = evidence.frames[destination.frame_index]
    if evidence.operation not in _OVERWRITING_OPERATIONS:
        return None  # a sum may be kept wider than the weights
    match destination.node:
        case ast.Attribute(ast.Name("self"), name):
            is_odd = set(evidence.dtype_counts) == {dtype} and destination.dtype.is_floating_point
            if is_odd and not isinstance(destination.tensor, nn.Parameter):
                owner = frame.variables.get("self")
                return find_storage_creation(evidence.frames, owner, name, dtype)
    return None


def _find_odd_destination(
    evidence: Evidence, destination: Operand, source: Producer, dtype: torch.dtype
) -> StorageCreation | None:
    """Returns the call that creates the destination of a write, a variable, with the dtype of the
    value, if all weights of the model have this dtype: what reads the variable next needs it too.
    """
    is_overwritten = evidence.operation in _OVERWRITING_OPERATIONS
    # a sum may be kept wider than the weights, and not narrower
    is_narrower = destination.dtype.itemsize < dtype.itemsize
    if not (is_overwritten or is_narrower) or set(evidence.dtype_counts) != {dtype}:
        return None
    if not isinstance(destination.node, ast.Name) or not is_in_user_file(source.location):
        return None
    text = rebuild_creation(source, str(dtype).removeprefix("torch."))
    return StorageCreation(text, source.location) if text and source.is_proven else None


def _describe_library_write(evidence: Evidence, destination: Operand) -> dict[str, Any]:
    """Returns the call of the user's code in which a library writes a value that autocast computed, if
    all weights of the model have the dtype of the destination: without autocast, the call works.
    """
    call = evidence.user_frame.expression
    floats = {dtype for dtype in evidence.dtype_counts if dtype.is_floating_point}
    is_in_library = not evidence.failing_frame.is_user_code
    if not is_in_library or not isinstance(call, ast.expr) or floats != {destination.dtype}:
        return {}
    return {
        "call": source_text(call),
        "call_at": evidence.user_frame.location,
        "device": evidence.device,
    }


def _describe_written_cast(
    evidence: Evidence, maker: Producer, destination: Operand
) -> dict[str, Any]:
    """Returns the facts about a cast that gave a written value its dtype, if the destination has
    the dtype of most weights.
    """
    is_odd = maker.is_proven and destination.dtype == evidence.majority_dtype
    if maker.kind != "cast" or not is_odd:
        return {}
    return {
        "cast": maker.text,
        "cast_at": maker.location,
        "setting": _read_setting_of_cast(maker.text),
        "needed": str(destination.dtype),
    }


def _describe_loaded_state(evidence: Evidence, destination: Operand) -> dict[str, Any]:
    """Returns the line that cast the loaded states of an optimizer, and the call that loaded them, if
    a value is written into a state whose dtype is not that of its parameter.
    """
    facts = evidence.optimizer
    load = None if facts is None else find_state_load(facts.optimizer)
    state = destination.tensor
    if facts is None or load is None or state is None:
        return {}
    for parameter, states in facts.optimizer.state.items():
        for key, value in states.items():
            if value is not state or state.dtype == parameter.dtype:
                continue
            cast = find_state_cast(evidence.frames, state.dtype)
            return {
                "state": key,
                "load": ast.unparse(load[0]),
                "load_at": load[1],
                "state_cast": "" if cast is None else cast.text,
                "state_cast_at": "" if cast is None else cast.location,
                "parameter_dtype": format_dtype(parameter.dtype),
            }
    return {}


def _read_setting_of_cast(text: str) -> str:
    """Returns the attribute of `self` to which a cast such as `x.to(self.precision)` casts, or ""."""
    match ast.parse(text, mode="eval").body:
        case ast.Call(_, [ast.Attribute(ast.Name("self"), _) as setting]):
            return ast.unparse(setting)
    return ""


@dataclass(frozen=True, slots=True)
class _LaterWrite:
    """A write after the one that failed, in the same function, which would fail too.

    cast      the written value with a cast
    line      the line of the write
    creation  the call that creates the destination in the default dtype, or None
    """

    cast: str
    line: int
    creation: ast.Call | None


def _find_later_writes(frame: CallFrame) -> list[_LaterWrite]:
    """Returns the later writes of the running function whose value has another dtype than their
    destination: assignments `TENSOR[...] = VALUE`, and calls such as `TENSOR.scatter_add_(...)`.
    """
    if frame.scope is None or not frame.is_user_code:
        return []
    writes = []
    for node in ast.walk(frame.scope):
        match node:
            case ast.Assign([ast.Subscript(target)], source) if node.lineno > frame.line:
                pass
            case ast.Call(ast.Attribute(target, method), [*_, source]) if (
                node.lineno > frame.line and method in _WRITING_OPERATIONS
            ):
                pass
            case _:
                continue
        value = read_value(source, frame)
        creation = _find_default_creation(target, node.lineno, frame)
        dtype = torch.get_default_dtype() if creation is not None else None
        destination = read_value(target, frame)
        if is_tensor(destination):
            dtype = destination.dtype
        if dtype is None or not is_tensor(value) or not value.dtype.is_floating_point:
            continue
        if value.dtype != dtype:
            cast = f"{add_brackets(ast.unparse(source))}.to({ast.unparse(target)}.dtype)"
            writes.append(_LaterWrite(cast, node.lineno, creation))
    return writes


def _find_default_creation(target: ast.expr, line: int, frame: CallFrame) -> ast.Call | None:
    """Returns the call that creates a variable of a function in the default dtype, before a line."""
    name = target.id if isinstance(target, ast.Name) else ""
    bindings = find_earlier_bindings(frame.scope or ast.Pass(), name, line)
    match bindings[:1]:
        case [ast.Assign(value=ast.Call(function, keywords=keywords) as call)]:
            has_dtype = any(keyword.arg == "dtype" for keyword in keywords)
            is_creation = ast.unparse(function) in _CREATIONS
            return call if is_creation and not has_dtype else None
    return None


def _describe_later_writes(
    frame: CallFrame, created: StorageCreation | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the changes of the later writes of the running function: the casts of their values, and
    the calls that create their destinations with a dtype, if the first destination is mended so.
    """
    writes = _find_later_writes(frame)
    casts = [f"`{write.cast}` at line {write.line}" for write in writes]
    creations = [write.creation for write in writes if write.creation is not None]
    texts = [
        f"`{ast.unparse(call)[:-1]}, dtype={dtype})` at {frame.location_of(call)}"
        for call in creations
        if created is not None and frame.location_of(call) != created.location
    ]
    return {
        "later_casts": " and ".join(casts),
        "later_creations": " and ".join(dict.fromkeys(texts)),
    }


def _cast_text(operand: Operand, destination: Operand) -> str:
    """Returns code that casts an operand to the dtype of the destination. If the operand is an item
    of a list, the code casts all tensors of the list.
    """
    if operand.list_name:
        return f"`[tensor.to({destination.dtype}) for tensor in {operand.list_name}]`"
    return f"`{add_brackets(operand.label)}.to({add_brackets(destination.label)}.dtype)`"
