"""Reads from the record of a run which call of the user's code gave weights their dtype."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

import torch
from torch import nn

from ...observe.origin import is_library_file
from .expressions import CASTING_METHODS, node_keyword, read_value
from .frames import CallFrame, make_called_frame, source_text
from .modules import ModelNames
from .running_code import RunningCode
from .weight_origin import ADAPTER_KEYWORD, DTYPE_KEYWORDS, PREPARATION, WeightOrigin
from .weight_record import RECORD, WeightEvent


def find_user_call(calls: Sequence[RunningCode]) -> RunningCode | None:
    """Returns the innermost frame of the user's code."""
    return next((call for call in calls if not is_library_file(call.code.co_filename)), None)


def find_recorded_origin(modules: Iterable[nn.Module], dtype: torch.dtype) -> WeightOrigin | None:
    """Returns the call that gave most weights of these modules their dtype. Only weights in `dtype`
    count. Returns None if the record does not contain this call.
    """
    return next(iter(list_origins(modules, dtype)), None)


def list_origins(modules: Iterable[nn.Module], dtype: torch.dtype) -> list[WeightOrigin]:
    """Returns the calls that gave the weights of these modules a dtype, that of most elements
    first.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    origins = {}
    for parameter, event in _iterate_last_events(modules, dtype):
        origin = _find_assignment(parameter) if event is None else read_origin(event)
        size = max(parameter.numel(), 1)
        if origin is not None:
            key = (origin.kind, origin.text, origin.location)
            counts[key] += size
            origins[key] = origin
    return [origins[key] for key, _ in counts.most_common()]


def find_tensor_origin(tensor: torch.Tensor) -> WeightOrigin | None:
    """Returns the call that gave a parameter or buffer its dtype."""
    event = _find_last_event(RECORD.events_of_tensor(tensor), tensor.dtype)
    return _find_assignment(tensor) if event is None else read_origin(event)


def is_added_to_built_model(model: nn.Module | None, weight: torch.Tensor) -> bool:
    """True if a program built the layer of a weight after the module that contains it, such as a new
    head that replaces the one of a model which was cast before.
    """
    for parent in () if model is None else model.modules():
        for layer in parent.children():
            if not any(weight is parameter for parameter in layer._parameters.values()):
                continue
            constructor = _read_constructor(type(parent))
            others = [part for part in parent.children() if part is not layer]
            return not _was_built_in(constructor, layer) and any(
                _was_built_in(constructor, part) for other in others for part in other.modules()
            )
    return False


def _was_built_in(constructor: CodeType | None, layer: nn.Module) -> bool:
    """True if a weight of a layer was registered while a constructor ran."""
    histories = RECORD.events_of(layer).values()
    return any(call.code is constructor for events in histories for call in events[0].calls)


def was_integer(tensor: torch.Tensor) -> bool:
    """True if a recorded call cast a tensor of integers to the dtype of this buffer."""
    event = None if RECORD.tensors is None else RECORD.tensors.event_of(tensor)
    before = None if event is None or event.kind != "cast" else event.before
    return before is not None and not before.dtype.is_floating_point and not before.dtype.is_complex


def _find_assignment(tensor: torch.Tensor) -> WeightOrigin | None:
    """Returns the line that changed the dtype of `parameter.data`, or that cast the tensor which a
    program stored as a buffer, with `--trace`.
    """
    if RECORD.tensors is None:
        return None
    if isinstance(tensor, nn.Parameter):
        event = RECORD.tensors.assignment_of(tensor)
    else:
        event = RECORD.tensors.event_of(tensor)
        event = event if event is not None and event.kind == "cast" else None
    calls = () if event is None else event.calls
    if event is None or find_user_call(calls) is None:
        return None
    return read_origin(WeightEvent(True, event.dtype, torch.get_default_dtype(), calls))


def find_construction(model: nn.Module) -> WeightOrigin | None:
    """Returns the call of the user's code that built a model, if all of its floating-point weights
    have one dtype and no call cast them. Returns None for all other models.
    """
    first = _find_first_event(model)
    origin = None if first is None else read_origin(first)
    if first is None or origin is None or origin.kind not in ("default", "construction"):
        return None
    return _find_construction_in(first, type(model), origin) or origin


def find_part_construction(
    names: ModelNames, model: nn.Module | None, owner: nn.Module
) -> WeightOrigin | None:
    """Returns the call of the user's code that built a part of a model in the default dtype: the
    outermost module around `owner`, or `owner` itself, all of whose weights have one dtype and were
    never cast. Returns None if there is no such call.
    """
    for _, part in names.named_modules(model):
        if part is model or all(module is not owner for module in part.modules()):
            continue
        first = _find_first_event(part)
        origin = None if first is None else read_origin(first)
        if first is not None and origin is not None and origin.kind == "default":
            construction = _find_construction_in(first, type(part), origin)
            if construction is not None:
                return construction
    return None


def _find_first_event(model: nn.Module) -> WeightEvent | None:
    """Returns the event of the first weight of a model, if all of its floating-point parameters have
    one dtype and no call cast them. For a model without parameters, its buffers count.
    """
    has_parameters = next(model.parameters(), None) is not None
    dtypes = set()
    histories = []
    for module in model.modules():
        weights = module._parameters if has_parameters else module._buffers
        for name, tensor in weights.items():
            if tensor is not None and tensor.is_floating_point():
                dtypes.add(tensor.dtype)
                histories.append(RECORD.events_of(module).get(name, []))
    if len(dtypes) != 1 or not all(histories):
        return None
    if any(event.dtype not in dtypes for events in histories for event in events):
        return None
    return histories[0][0]


def _find_construction_in(
    event: WeightEvent, kind: type, origin: WeightOrigin
) -> WeightOrigin | None:
    """Returns the call of the constructor of a class in which an event happened.

    origin  the innermost call of the user's code
    """
    call = _find_constructor_call(event, kind)
    if call is None:
        return None
    text, location, node = _read_call(*call)
    return WeightOrigin(origin.kind, text, location, node)


def _find_constructor_call(event: WeightEvent, kind: type) -> tuple[CodeType, int] | None:
    """Returns the call of the user's code that ran the constructor of a class."""
    constructor = _read_constructor(kind)
    codes = [call.code for call in event.calls]
    if constructor not in codes:
        return None
    last = max(index for index, code in enumerate(codes) if code is constructor)
    outer = event.calls[last + 1 :]
    return next((call[:2] for call in outer if not is_library_file(call.code.co_filename)), None)


def _read_constructor(kind: type) -> CodeType | None:
    constructor = inspect.unwrap(inspect.getattr_static(kind, "__init__"))
    return getattr(constructor, "__code__", None)


@dataclass(frozen=True, slots=True)
class CastInCall:
    """A call that casts a weight while its layer is running, such as in a hook before its forward.

    stored_dtype  the dtype that the weight has outside of the call of its layer
    arguments     the variable of the hook that holds the arguments of the layer, or ""
    """

    origin: WeightOrigin
    stored_dtype: torch.dtype
    arguments: str


def find_cast_in_call(
    tensor: torch.Tensor, owner: nn.Module | None, frames: Sequence[CallFrame]
) -> CastInCall | None:
    """Returns the call that gave a weight its dtype, if it ran in the call of the weight's owner that
    is running. Returns None for all other weights.
    """
    events = RECORD.events_of_tensor(tensor)
    if len(events) < 2 or events[-1].dtype != tensor.dtype or not events[-1].is_cast:
        return None
    callers = {
        (caller.code, caller.position)
        for caller, frame in itertools.pairwise(frames)
        if frame.variables.get("self") is owner and caller.variables.get("self") is not owner
    }
    places = [(call.code, make_called_frame(*call).position) for call in events[-1].calls]
    origin = read_origin(events[-1])
    hook = find_user_call(events[-1].calls)
    if origin is None or hook is None or callers.isdisjoint(places):
        return None
    stored = next((e.dtype for e in reversed(events) if e.dtype != tensor.dtype), tensor.dtype)
    names = hook.code.co_varnames[: hook.code.co_argcount]
    parameters = names[1:] if names[:1] == ("self",) else names
    is_hook = len(parameters) == 2 and hook.code.co_kwonlyargcount == 0
    return CastInCall(origin, stored, parameters[1] if is_hook else "")


def find_cast(tensor: torch.Tensor) -> tuple[WeightOrigin, CodeType] | None:
    """Returns the call that cast a parameter or buffer to the dtype that it has now, and the code of
    the function that contains the call. Returns None if the tensor was not cast.
    """
    event = _find_last_event(RECORD.events_of_tensor(tensor), tensor.dtype)
    origin = None if event is None else read_origin(event)
    call = None if event is None else find_user_call(event.calls)
    if origin is None or call is None or origin.kind not in ("cast", "library"):
        return None
    return origin, call.code


def find_state_load(optimizer: torch.optim.Optimizer) -> tuple[ast.Call, str] | None:
    """Returns the last call of the user's code that loaded the states of an optimizer, and its
    place. The optimizer's own method, which calls that of its base class, does not count.
    """
    for code, instruction, _ in RECORD.last_load_of(optimizer):
        if not is_library_file(code.co_filename) and code.co_name != "load_state_dict":
            _, location, call = _read_call(code, instruction)
            return None if call is None else (call, location)
    return None


def is_cast_of_most_weights(origin: WeightOrigin, model: nn.Module) -> bool:
    """True if a call cast most weights of a model, also if other calls cast some of them later."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    origins = [
        [read_origin(event) for event in RECORD.events_of_tensor(p) if event.is_cast]
        for p in parameters
    ]
    count = sum(p.numel() for p, found in zip(parameters, origins) if origin in found)
    return count * 2 > sum(p.numel() for p in parameters)


def _iterate_last_events(
    modules: Iterable[nn.Module], dtype: torch.dtype
) -> Iterator[tuple[nn.Parameter, WeightEvent | None]]:
    """Yields each weight in a dtype, and the event that gave it this dtype. The event is None if
    other code than a call of a module changed the dtype, or if no event was recorded.
    """
    for module in modules:
        events = RECORD.events_of(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == dtype:
                yield parameter, _find_last_event(events.get(name, []), dtype)


def _find_last_event(events: Sequence[WeightEvent], dtype: torch.dtype) -> WeightEvent | None:
    """Returns the event that gave a weight the dtype that it has now. Returns None if other code
    changed it later, such as `parameter.data = ...`.
    """
    if not events:
        return None
    if events[-1].dtype == dtype:
        return events[-1]
    # PEFT builds adapters in fp32, casts them to the dtype of the base, and back in place
    earlier = [event for event in events if event.dtype == dtype]
    if not earlier:
        return None
    calls = [find_user_call(event.calls) for event in (earlier[-1], events[-1])]
    first, last = [None if call is None else call[:2] for call in calls]
    return earlier[-1] if last is not None and first == last else None


def read_origin(event: WeightEvent) -> WeightOrigin | None:
    """Returns the innermost call of the user's code in which an event happened."""
    codes = [call.code for call in event.calls]
    index = next((i for i, code in enumerate(codes) if not is_library_file(code.co_filename)), None)
    if index is None:
        return None
    text, location, call = _read_call(*event.calls[index][:2])
    frame = make_called_frame(*event.calls[index])
    kind = _find_kind(event, call, frame, codes[:index])
    function = ""
    if kind == "library":
        inner = next(
            frame
            for frame in (make_called_frame(*call) for call in event.calls)
            if frame.function not in CASTING_METHODS
        )
        function = f"{inner.code.co_qualname} ({inner.location})"
    return WeightOrigin(kind, text, location, call, function)


def _read_call(code: CodeType, instruction: int) -> tuple[str, str, ast.Call | None]:
    """Returns the source code and the place of a call that has ended, and its syntax tree. For an
    assignment, such as `self.weight = nn.Parameter(...)`, returns the source code of the statement,
    and the call whose result is assigned.
    """
    return _read_call_in_file(code.co_filename, code, instruction)


@functools.cache
def _read_call_in_file(
    file: str, code: CodeType, instruction: int
) -> tuple[str, str, ast.Call | None]:
    """As `_read_call`. The file is an argument of its own, since equal functions of two files, such
    as two cells of a notebook, have equal code.
    """
    frame = make_called_frame(code, instruction)
    call = frame.expression
    if not isinstance(call, ast.Call):
        statement = frame.statement
        value = statement.value if isinstance(statement, ast.Assign) else None
        return frame.text, frame.location, value if isinstance(value, ast.Call) else None
    return source_text(call), frame.location_of(call), call


def _find_kind(
    event: WeightEvent,
    call: ast.Call | None,
    frame: CallFrame,
    library_codes: Sequence[CodeType],
) -> str:
    """Returns the kind of an origin.

    call           the call of the user's code, in `frame`
    library_codes  the code of the functions of libraries that this call was running
    """
    functions = {code.co_name for code in library_codes}
    keywords = [] if call is None else [node_keyword(call, name) for name in DTYPE_KEYWORDS]
    dtypes = [read_value(keyword, frame) for keyword in keywords if keyword is not None]
    if PREPARATION in functions:
        return "preparation"
    if "from_pretrained" in functions:
        is_transformers = any(
            code.co_name == "from_pretrained"
            and f"{os.sep}transformers{os.sep}" in code.co_filename
            for code in library_codes
        )
        return "checkpoint" if "auto" in dtypes or (is_transformers and not dtypes) else "loading"
    if event.is_cast:
        if call is not None and node_keyword(call, ADAPTER_KEYWORD) is not None:
            return "adapters"
        return "cast" if functions <= CASTING_METHODS else "library"
    if call is not None and ast.unparse(call.func).endswith("load_state_dict"):
        return "assignment"
    has_dtype = call is not None and "dtype" in ast.unparse(call)
    return "default" if event.dtype == event.default_dtype and not has_dtype else "construction"
