"""Reads from the record of `doctor run --trace` which call gave a tensor its dtype, and what the
function that failed had received.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...dtypes import format_dtype
from ...observe.origin import is_library_file
from .arrays import find_float64_origin
from .autocast import AutocastState
from .expressions import CASTING_METHODS, read_value
from .frames import CallFrame, make_called_frame, source_text
from .modules import ModelNames
from .producer import Producer, Promotion, Source
from .recorded_origins import find_tensor_origin, find_user_call
from .running_code import RunningCode
from .weight_record import RECORD

if TYPE_CHECKING:
    from .tensor_record import FailedCall, TensorEvent

_ARRAY_REASON = "its data is a NumPy array of"
_KINDS = {"conversion": "call", "operation": "call", "outside": "parameter"}


def find_recorded_producer(
    tensor: torch.Tensor, frames: Sequence[CallFrame], names: ModelNames
) -> Producer | None:
    """Returns the call that gave a tensor its dtype, or None if the record does not show it."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    if event is None:
        return None
    *operations, last = _follow(event)
    path = ""
    if last.kind == "outside":
        path = _read_path(last, names)
        if not path or not operations:
            return _find_weight_producer(last, path)
        last = operations[-1]
    place = _find_place(last, frames)
    if place is None:
        return None
    described = [_describe_promotion(event) for event in operations if event.kind == "promotion"]
    return Producer(
        "parameter" if path else _KINDS.get(last.kind, last.kind),
        place.text,
        place.location,
        place.function,
        path,
        is_proven=True,
        promotions=tuple(promotion for promotion in described if promotion is not None),
        sources=tuple(_list_sources(last, names)),
        reason=_find_reason(last, path, place, names),
    )


def _find_weight_producer(event: TensorEvent, path: str) -> Producer | None:
    """Returns the call that gave a weight its dtype, which a value kept, also if no model that is
    running contains the weight. If the weight was cast after that, returns this later cast. Returns
    None for other tensors.
    """
    source = None if event.operand is None else event.operand()
    origin = None if source is None else find_tensor_origin(source)
    if origin is None or source is None:
        return None
    weight = path or "the weight"
    if source.dtype != event.dtype:
        later_dtype = format_dtype(source.dtype)
        reason = f"the dtype of {weight} before `{origin.text}` made it {later_dtype}"
        text = f"{weight} before {origin.text}"
        return Producer("copy", text, origin.location, "", path, is_proven=True, reason=reason)
    reason = f"it {origin.describe_action(path or 'the weights', format_dtype(event.dtype))}"
    return Producer(
        "parameter",
        origin.text,
        origin.location,
        "",
        path,
        is_proven=True,
        reason=reason,
        weight_origin=origin,
    )


def list_arrays_of_function(
    tensor: torch.Tensor, frames: Sequence[CallFrame]
) -> list[tuple[str, str]]:
    """Returns the code and the place of each call that made a tensor from an array of NumPy, in the
    function of the user's code that did so for this tensor, if variables hold several such tensors
    of its dtype: all of them have the same fault. Otherwise returns an empty list.
    """
    first = _find_array_call(tensor)
    if first is None:
        return []
    calls = [first]
    for frame in frames:
        values = list(frame.variables.values()) if frame.is_user_code else []
        for value in values:
            if not isinstance(value, torch.Tensor) or value.dtype != tensor.dtype:
                continue
            call = _find_array_call(value)
            if call is not None and call.code is first.code:
                calls.append(call)
    places = map(_make_place, calls)
    texts = list(dict.fromkeys((place.text, place.location) for place in places))
    return texts if len(texts) > 1 else []


def _find_array_call(tensor: torch.Tensor) -> RunningCode | None:
    """Returns the line of the user's code that made a tensor from an array of NumPy."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    last = None if event is None else _follow(event)[-1]
    if last is None or not last.data_type or last.data_type.startswith("torch."):
        return None
    call = last.calls[0] if last.calls else None
    return None if call is None or is_library_file(call.code.co_filename) else call


def confirm_producer(static: Producer, recorded: Producer, tensor: torch.Tensor) -> Producer:
    """Returns what the source code shows, if the record confirms it: the program ran this line when
    it computed the tensor, or a module with weights of this dtype computed it. Otherwise returns
    what the record shows.
    """
    is_parameter = static.kind == "parameter" and static.path == recorded.path
    # NumPy's calls are not recorded
    is_array = recorded.reason.startswith(_ARRAY_REASON) and "(" in static.text
    is_array = is_array and (bool(static.reason) or _is_made_in_library(tensor))
    is_module = static.kind == "module"
    is_run = static.location in _list_locations(tensor)
    if is_run and _is_idle_cast(static, recorded):
        origin = recorded.describe(format_dtype(tensor.dtype))
        reason = f"the tensor has this dtype before the cast: {origin}"
        # with another argument, as of `to`, the cast would change the dtype
        kind = "call" if static.text.endswith("()") else static.kind
        return dataclasses.replace(static, kind=kind, reason=reason)
    if static.is_proven and (is_parameter or is_array or is_module or is_run):
        is_same_call = static.location == recorded.location and not static.reason
        return dataclasses.replace(static, reason=recorded.reason) if is_same_call else static
    return dataclasses.replace(
        recorded,
        passed=static.passed,
        passed_at=static.passed_at,
        hook=static.hook,
        stored=static.stored,
        stored_at=static.stored_at,
    )


def _is_idle_cast(static: Producer, recorded: Producer) -> bool:
    """True if the source code shows a cast of a tensor that had the dtype already, because the
    record shows another call that made it, such as one inside the expression that is cast.
    """
    if static.kind != "cast" or recorded.kind == "unknown":
        return False
    match ast.parse(static.text, mode="eval").body:
        case ast.Call(ast.Attribute(_, method)) if method in CASTING_METHODS:
            is_other_cast = recorded.text != static.text and recorded.location == static.location
            return recorded.kind != "cast" or is_other_cast
    return False


def _is_made_in_library(tensor: torch.Tensor) -> bool:
    """True if a library's line gave a tensor its dtype, such as that of a DataLoader."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    calls = () if event is None else _follow(event)[-1].calls
    return bool(calls) and is_library_file(calls[0].code.co_filename)


def _list_locations(tensor: torch.Tensor) -> set[str]:
    """Returns the lines that were running in the calls that gave a tensor its dtype."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    return {
        make_called_frame(call.code, call.instruction).location
        for part in (() if event is None else event.chain())
        for call in part.calls
    }


def is_promoted_at(tensor: torch.Tensor, location: str) -> bool:
    """True if the record shows that an operation at a line gave a tensor its wider dtype."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    calls = [
        part.calls[0]
        for part in (() if event is None else event.chain())
        if part.kind == "promotion" and part.calls
    ]
    return any(make_called_frame(*call).location == location for call in calls)


def find_deciding_weight(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight from which a tensor has its dtype, also through casts to the dtype of
    another tensor, or None.
    """
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    last = None if event is None else list(event.chain())[-1]
    source = None if last is None or last.operand is None else last.operand()
    return source if source is not None and source.dtype == tensor.dtype else None


def find_failed_call(error: BaseException) -> FailedCall | None:
    """Returns the record of the PyTorch function that raised this error."""
    record = RECORD.tensors
    call = None if record is None else record.failed_call
    return call if call is not None and call.message == str(error) else None


def match_arguments(
    call: FailedCall, frame: CallFrame, nodes: Sequence[ast.AST]
) -> tuple[list[ast.AST], list[Any]]:
    """Returns the expressions of the operands of the failing line, and the values that the failed
    function received for them. If they cannot be matched, the values are an empty list.
    """
    expressions = list(nodes)
    if not call.calls or call.calls[0].code is not frame.code:
        return expressions, []
    arguments = [*call.args, *call.kwargs.values()]
    if call.function == "__setitem__":
        arguments = [arguments[0], arguments[2], arguments[1]]
    if len(arguments) == len(expressions) + 1:
        match frame.expression:
            case ast.Call(ast.Attribute(receiver)):
                expressions.insert(0, receiver)  # the tensor whose method was called
    if len(arguments) != len(expressions):
        return list(nodes), []
    for node, argument in zip(expressions, arguments):
        value = read_value(node, frame)
        if isinstance(value, torch.Tensor) and value is not argument:
            return list(nodes), []  # another call on this line
    return expressions, arguments


def correct_autocast(state: AutocastState, call: FailedCall | None, device: str) -> AutocastState:
    """Returns the autocast state in which the failed function ran."""
    if call is None:
        return state
    dtype = call.autocast.get(device or "cpu")
    if dtype is None:
        return state if state.is_on is False else AutocastState()
    if state.is_on and state.dtype == dtype:
        return state
    return AutocastState(True, dtype, device, find_region_location(call.region) or state.location)


def find_region_location(region: Sequence[RunningCode]) -> str:
    """Returns the line of the user's code that entered a region of autocast, or ""."""
    call = find_user_call(region)
    return "" if call is None else make_called_frame(call.code, call.instruction).location


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The expression that made a tensor.

    inner  the library's line that did it for this expression; "" if the expression did it itself
    """

    text: str
    location: str
    function: str
    inner: str = ""


def _follow(event: TensorEvent) -> list[TensorEvent]:
    """Returns the event that decided a dtype, after the operations through which the tensor got it,
    the last one first.
    """
    events = []
    for part in event.chain():
        events.append(part)
        if part.kind not in ("promotion", "conversion"):
            break
    return events


def _read_path(event: TensorEvent, names: ModelNames) -> str:
    source = None if event.operand is None else event.operand()
    return "" if source is None else names.tensor_path(source) or ""


def _find_place(event: TensorEvent, frames: Sequence[CallFrame]) -> _Place | None:
    """Returns the expression of the user's code that made a tensor. If this expression is still
    running, as `model(**batch)` is, returns the library's line inside it.
    """
    user_call = find_user_call(event.calls)
    if user_call is None:
        return None
    inner = _make_place(event.calls[0])
    if user_call is event.calls[0]:
        return inner
    frame = make_called_frame(user_call.code, user_call.instruction)
    running = {(frame.code, frame.position) for frame in frames}
    if (frame.code, frame.position) in running:
        return inner
    place = _make_place(user_call)
    return dataclasses.replace(place, inner=f"`{inner.text}` ({inner.location})")


def _make_place(call: RunningCode) -> _Place:
    frame = make_called_frame(call.code, call.instruction)
    node = frame.expression
    text = source_text(node) if isinstance(node, ast.expr) else frame.text
    return _Place(text, frame.location, frame.function)


def _describe_promotion(event: TensorEvent) -> Promotion | None:
    """Returns a promotion in the user's code, or None for one in a library."""
    call = event.calls[0] if event.calls else None
    if call is None or is_library_file(call.code.co_filename):
        return None
    frame = make_called_frame(call.code, call.instruction)
    match frame.expression:
        case ast.BinOp(left, _, right):
            operand: ast.expr = (left, right)[min(event.position, 1)]
        case ast.Call(args=arguments) if event.position < len(arguments):
            operand = arguments[event.position]
        case _:
            return None
    return Promotion(event.function.capitalize(), ast.unparse(operand), frame.location)


def _find_reason(event: TensorEvent, path: str, place: _Place, names: ModelNames) -> str:
    """Returns why a call returns its dtype, as a part of a sentence, or ""."""
    dtype_name = format_dtype(event.dtype)
    if path:
        return f"it computes with {path}, which is {dtype_name}{_describe_weight(event, path)}"
    if event.kind == "autocast":
        location = find_region_location(event.region)
        at = f" ({location})" if location else ""
        if event.dtype == torch.float32:
            return f"autocast{at} computes it in fp32"
        return f"it runs under autocast{at}"
    if event.data_type and not event.data_type.startswith("torch."):
        return f"{_ARRAY_REASON} {event.data_type}{_describe_array(event)}"
    if event.kind == "operation" and event.dtype.is_floating_point:
        sources = " and ".join(sorted(map(format_dtype, event.operand_dtypes)))
        floats = [dtype for dtype in event.operand_dtypes if dtype.is_floating_point]
        if not floats:
            return f"it computes floats from {sources}"
        if len(floats) > 1:
            sources = _describe_sources(list(_list_sources(event, names)))
            return f"{' with '.join(map(format_dtype, floats))} gives {dtype_name}{sources}"
    if event.kind in ("cast", "creation") and event.earlier is not None:
        return _describe_example(event.earlier, names)
    if place.inner:
        return f"{place.inner} makes it"
    return ""


def _list_sources(event: TensorEvent, names: ModelNames) -> Iterator[Source]:
    """Yields what made the operands of an operation of floats of two dtypes, whose result has a
    third dtype.
    """
    for part in (event.earlier, event.before):
        last = None if part is None else _follow(part)[-1]
        if last is None or event.kind != "operation" or not last.dtype.is_floating_point:
            continue
        path = _read_path(last, names)
        call = find_user_call(last.calls)
        if path:
            yield Source(path, "", last.dtype)
        elif call is not None:
            place = _make_place(call)
            yield Source(place.text, place.location, last.dtype)


def _describe_sources(sources: Sequence[Source]) -> str:
    """Returns what made two operands, as the end of a sentence, or ""."""
    texts = [
        f"`{source.text}` ({source.location})" if source.location else source.text
        for source in sources
    ]
    names = [f"{text} is {format_dtype(s.dtype)}" for text, s in zip(texts, sources)]
    return f": {' and '.join(names)}" if names else ""


def _describe_array(event: TensorEvent) -> str:
    """Returns the expression that made the array of a creation fp64, as the end of a sentence, or ""."""
    call = event.calls[0] if event.calls else None
    if call is None or event.data_type != "float64" or is_library_file(call.code.co_filename):
        return ""
    frame = make_called_frame(*call)
    match frame.expression:
        case ast.Call(args=[data, *_]):
            origin = find_float64_origin(data, frame)
            if origin is not None:
                return f": NumPy computes `{origin.text}` ({origin.location}) in fp64"
    return ""


def _describe_weight(event: TensorEvent, path: str) -> str:
    """Returns the call that gave a weight its dtype, as the end of a sentence, or ""."""
    weight_event = list(event.chain())[-1]
    source = None if weight_event.operand is None else weight_event.operand()
    origin = None if source is None else find_tensor_origin(source)
    if origin is None or source is None or source.dtype != weight_event.dtype:
        return ""
    return f": {origin.describe('it', format_dtype(weight_event.dtype))}"


def _describe_example(event: TensorEvent, names: ModelNames) -> str:
    """Describes the tensor whose dtype a cast or a new tensor took, as a part of a sentence."""
    dtype_name = format_dtype(event.dtype)
    *operations, last = _follow(event)
    path = _read_path(last, names)
    operation = next((part for part in operations if part.calls), None)
    if path and operation is not None:
        place = _make_place(operation.calls[0])
        result = f"it takes the dtype of `{place.text}` ({place.location})"
        return f"{result}, which computes with {path} in {dtype_name}{_describe_weight(last, path)}"
    if path:
        return f"{path} is {dtype_name}{_describe_weight(last, path)}"
    if not last.calls:
        return ""
    place = _make_place(find_user_call(last.calls) or last.calls[0])
    return f"`{place.text}` ({place.location}) made the tensor {dtype_name} whose dtype it takes"
