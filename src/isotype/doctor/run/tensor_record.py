"""Records for each tensor of a running program which call gave it its dtype. `doctor run` does so
during the first steps of a program, and `doctor run --trace` during the whole program.

A call whose result has the dtype of one of its operands passes on the event of this operand. Every
other call, such as a cast, a new tensor or a promotion, is a new event. The record also keeps the
last PyTorch function that failed, with its arguments and the autocast state in which it ran.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.weak import WeakIdKeyDictionary

from ...observe.origin import is_library_file
from .expressions import CASTING_METHODS
from .forward_calls import list_new_nodes, make_forward_call, note_forward_call
from .replacements import Replacement
from .running_code import RunningCode, read_calls, read_innermost_call

_MAX_CHAIN = 8  # events before an event that are kept
_MAX_ITEMS = 64  # items of a list or dict in which tensors are searched
_MAX_DEPTH = 2
_DATA = torch.Tensor.data
_SETTER = "__set__"
_GETTER = "__get__"
_CAST_FUNCTIONS = CASTING_METHODS | {"type_as", "int", "long", "short", "bool", "char", "byte"}
# the kinds of events, the most explicit ones last
_RANKS = (
    *("outside", "creation", "parameter", "conversion"),
    *("operation", "promotion", "autocast", "cast"),
)
# functions of a layer, whose weight must have the dtype of the input
_LAYER_FUNCTIONS = frozenset(("linear", "conv1d", "conv2d", "conv3d"))
_DEVICES = ("cpu", "cuda", "xpu", "mps")


@dataclass(frozen=True, slots=True, eq=False)
class TensorEvent:
    """A call that gave a tensor its dtype.

    kind      `cast`, `creation`, `autocast`, `promotion`, `conversion` (between complex and real
              numbers), `operation`, or `outside` for a tensor that no recorded call made, such as a
              weight
    function  the name of the PyTorch function
    calls     the frames that do not belong to PyTorch, the innermost first
    operand   for `outside`: the tensor itself
    earlier   for a promotion: the event of the operand with the wider dtype. For a cast to the
              dtype of another tensor: the event of that tensor. For a conversion or an operation:
              the event of the first operand
    before    for a cast: the event of the tensor before it. For an operation of floats of two dtypes:
              the event of the second operand
    operand_dtypes  the dtypes of the operands
    position  for a promotion: the number of the wider operand among the operands
    data_type  for a creation without a dtype: the type of the data, such as `float64` for an array of NumPy
    region    for `autocast`: the calls that entered the region
    """

    kind: str
    dtype: torch.dtype
    function: str = ""
    calls: tuple[RunningCode, ...] = ()
    operand: weakref.ref[torch.Tensor] | None = None
    earlier: TensorEvent | None = None
    before: TensorEvent | None = None
    operand_dtypes: tuple[torch.dtype, ...] = ()
    position: int = 0
    data_type: str = ""
    region: tuple[RunningCode, ...] = ()

    def chain(self) -> Iterator[TensorEvent]:
        """Yields this event, then the event before it, and so on back to the first one."""
        event: TensorEvent | None = self
        while event is not None:
            yield event
            event = event.earlier


@dataclass(frozen=True, slots=True, eq=False)
class FailedCall:
    """The last PyTorch function that raised an error.

    message   the text of the error
    calls     the frames that do not belong to PyTorch, the innermost first
    autocast  the dtype of autocast by device, for the devices on which it was on
    region    the calls that entered the innermost region of autocast
    """

    message: str
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: tuple[RunningCode, ...]
    autocast: dict[str, torch.dtype]
    region: tuple[RunningCode, ...]


class TensorRecord(TorchFunctionMode):
    """Records the events of the tensors of the main thread while the mode is on.

    is_complete   whether the record has observed the program from its start until now
    has_compiled  whether the program compiles code with `torch.compile`, which does nothing here
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed_call: FailedCall | None = None
        self.is_complete = True
        self.has_compiled = False
        self._events: MutableMapping[torch.Tensor, TensorEvent] = WeakIdKeyDictionary()
        self._assignments: MutableMapping[torch.Tensor, TensorEvent] = WeakIdKeyDictionary()
        self._regions: list[tuple[RunningCode, ...]] = []  # the autocast regions that are entered
        self._replacements: list[Replacement] = []  # while the record is on
        self._lasting_replacements: list[Replacement] = []  # until the record is removed

    @property
    def is_recording(self) -> bool:
        """Whether the record is on."""
        return bool(self._replacements)

    def install(self) -> None:
        """Starts to record."""
        self.start()
        self._lasting_replacements = [Replacement.make(torch, "compile", self._wrap_compile)]

    def remove(self) -> None:
        """Stops to record for good. The events remain."""
        self.stop()
        for replacement in self._lasting_replacements:
            replacement.undo()
        self._lasting_replacements = []

    def start(self) -> None:
        """Switches the record on. The replaced functions do not call the mode, or run the program's
        code in backward, where PyTorch has switched the mode off.
        """
        self.__enter__()
        self._replacements = [
            Replacement.make(owner, name, wrap)
            for owner, name, wrap in (
                (torch, "from_numpy", self._record_from_numpy),
                (autocast, "__enter__", self._record_region),
                (autocast, "__exit__", self._record_region_end),
                (BackwardCFunction, "apply", self._record_inside),
                (saved_tensors_hooks, "__init__", self._record_unpacking),
            )
        ]

    def stop(self) -> None:
        """Switches the record off. The events remain."""
        for replacement in self._replacements:
            replacement.undo()
        self._replacements = []
        self._leave_stack()

    def _is_on_stack(self) -> bool:
        return any(mode is self for mode in _get_current_function_mode_stack())

    def _leave_stack(self) -> None:
        """Removes the mode from PyTorch's stack of modes, also below modes of the program."""
        stack = _get_current_function_mode_stack()
        if not self._is_on_stack():
            return  # such as inside a call that the mode has passed on
        for _ in stack:
            _pop_mode()
        for mode in stack:
            if mode is not self:
                _push_mode(mode)

    def event_of(self, tensor: torch.Tensor) -> TensorEvent | None:
        """Returns the event that gave a tensor its dtype, or None if no recorded call made the
        tensor. The event of a parameter is always of the kind `outside`: parameters have a record
        of their own.
        """
        event = self._events.get(tensor)
        if event is None or event.dtype != tensor.dtype:
            return None
        return None if isinstance(tensor, nn.Parameter) and event.kind != "outside" else event

    def assignment_of(self, parameter: nn.Parameter) -> TensorEvent | None:
        """Returns the last assignment to `parameter.data`, if it gave the parameter its dtype."""
        event = self._assignments.get(parameter)
        return event if event is not None and event.dtype == parameter.dtype else None

    # ---- calls of functions
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first_number = torch.autograd._get_sequence_nr()
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            # after an error for lack of memory, the program must be able to free these arguments
            if not isinstance(error, torch.OutOfMemoryError):
                with suppress(Exception):
                    self._keep_failure(str(error), func, args, kwargs)
            raise
        with suppress(Exception):  # the program must not end because of its record
            self._record_result(func, args, kwargs, result, first_number)
        return result

    def _record_result(
        self, func: Any, args: Any, kwargs: Any, result: Any, first_number: int
    ) -> None:
        if torch.jit.is_tracing():
            return  # the record's own calls, such as `numel`, would be traced too
        name = func.__name__
        if name == _GETTER:
            if isinstance(result, torch.Tensor) and result not in self._events:
                self._inherit(result, args[:1])
        elif name == _SETTER:
            self._record_setter(func, args)
        else:
            self._record_call(name, args, kwargs, result, first_number)

    def _note_forward_call(
        self, args: Any, outputs: Sequence[torch.Tensor], first_number: int
    ) -> None:
        """Notes in the nodes of autograd that a call made which call it was."""
        nodes = list_new_nodes(outputs, first_number)
        running = read_innermost_call(sys._getframe(2)) if nodes else None
        if running is not None:
            region = self._regions[-1] if self._regions else ()
            device = outputs[0].device.type
            call = make_forward_call(running, first_number, args, device, region)
            note_forward_call(nodes, call)

    def _keep_failure(self, message: str, func: Any, args: Any, kwargs: Any) -> None:
        enabled = {
            device: torch.get_autocast_dtype(device)
            for device in _DEVICES
            if torch.is_autocast_enabled(device)
        }
        calls = read_calls(sys._getframe(1))
        region = self._regions[-1] if self._regions else ()
        self.failed_call = FailedCall(
            message, func.__name__, tuple(args), kwargs, calls, enabled, region
        )

    def _record_call(
        self, name: str, args: Any, kwargs: Any, result: Any, first_number: int
    ) -> None:
        outputs = [tensor for tensor in _iterate_tensors(result) if _has_number_dtype(tensor)]
        if not outputs:
            return
        operands = list(_iterate_tensors((args, kwargs)))
        if any(operand.dtype != outputs[0].dtype for operand in operands):
            self._note_forward_call(args, outputs, first_number)
        for output in outputs:
            if any(output is operand for operand in operands):
                if name in ("to", "type_as"):
                    self._record_kept_dtype(output)
                continue  # an operation in place keeps the dtype
            if not self._inherit(output, operands, name):
                self._events[output] = self._make_event(name, args, kwargs, output, operands)

    def _record_kept_dtype(self, tensor: torch.Tensor) -> None:
        """Records a cast to the dtype of another tensor, if the tensor has this dtype already. The
        other tensor then decides the dtype too.
        """
        calls = read_calls(sys._getframe(2))
        example = _find_example(calls, sys._getframe(2))
        if example is None or example is tensor or example.dtype != tensor.dtype:
            return
        earlier = self._event_or_outside(example)
        if _is_in_library(calls):
            self._events[tensor] = earlier  # the program's own code decided the dtype before
        elif earlier is not self.event_of(tensor):
            self._events[tensor] = TensorEvent("cast", tensor.dtype, "to", calls, earlier=earlier)

    def _inherit(
        self, output: torch.Tensor, operands: Sequence[torch.Tensor], name: str = ""
    ) -> bool:
        """Passes on the event of an operand that has the dtype of the result. Returns False if
        there is none, or if the call also widened another operand.
        """
        dtype = output.dtype
        if any(_is_narrower(operand.dtype, dtype) and operand.dim() for operand in operands):
            return False
        source = self._find_deciding_operand(operands, dtype, name)
        if source is None:
            return False
        self._events[output] = self._event_or_outside(source)
        return True

    def _find_deciding_operand(
        self, operands: Sequence[torch.Tensor], dtype: torch.dtype, name: str = ""
    ) -> torch.Tensor | None:
        """Returns the operand whose dtype the most explicit call decided, such as a cast, or None if
        no operand has this dtype. The weight of a layer has the dtype of the input: it decides
        nothing if the origin of the input is known.
        """
        sources = [operand for operand in operands if operand.dtype == dtype]
        if len(sources) < 2:
            return sources[0] if sources else None
        if name in _LAYER_FUNCTIONS and self._rank(sources[0]) > 0:
            return sources[0]
        return max(sources, key=self._rank)

    def _rank(self, tensor: torch.Tensor) -> int:
        if not tensor.numel():
            return -1  # such as the empty start of a cache
        event = self.event_of(tensor)
        while (
            event is not None and event.kind in ("cast", "creation") and event.earlier is not None
        ):
            event = event.earlier  # the dtype is that of another tensor
            if event.operand is not None and isinstance(event.operand(), nn.Parameter):
                return _RANKS.index("parameter")
        if event is None and isinstance(tensor, nn.Parameter):
            return _RANKS.index("parameter")
        return _RANKS.index("outside" if event is None else event.kind)

    def _event_or_outside(self, tensor: torch.Tensor) -> TensorEvent:
        event = self.event_of(tensor)
        if event is None:
            event = TensorEvent("outside", tensor.dtype, operand=weakref.ref(tensor))
            self._events[tensor] = event
        return event

    def _make_event(
        self, name: str, args: Any, kwargs: Any, output: torch.Tensor, operands: Any
    ) -> TensorEvent:
        dtype = output.dtype
        calls = read_calls(sys._getframe(2))
        operand_dtypes = tuple(dict.fromkeys(operand.dtype for operand in operands))
        source = self._find_deciding_operand(operands, dtype)
        data_type, earlier, before, position = "", None, None, 0
        region: tuple[RunningCode, ...] = ()
        if not operands:
            kind = "creation"
            data = args[0] if args else kwargs.get("data")
            has_dtype = kwargs.get("dtype") is not None
            data_type = "" if has_dtype else str(getattr(data, "dtype", ""))
            example = _find_example(calls, sys._getframe(2)) if has_dtype else None
            if example is not None and example.dtype == dtype:
                earlier = self._event_or_outside(example)
        elif source is not None:
            kind = "promotion"
            earlier = self._event_or_outside(source)
            position = next(i for i, operand in enumerate(operands) if operand is source)
        elif name in _CAST_FUNCTIONS or kwargs.get("dtype") == dtype:
            kind = "cast"
            before = self._event_or_outside(operands[0])
            if _is_cast_back(before, dtype, calls):
                assert before.before is not None
                return before.before
            example = _find_example(calls, sys._getframe(2))
            if example is not None and example.dtype == dtype:
                earlier = self._event_or_outside(example)
                if _is_in_library(calls):
                    return earlier  # what made the other tensor decides this dtype too
        elif torch.is_autocast_enabled(output.device.type):
            kind = "autocast"
            region = self._regions[-1] if self._regions else ()
        else:
            is_conversion = _has_same_precision(operands[0].dtype, dtype)
            kind = "conversion" if is_conversion else "operation"
            earlier = self._event_or_outside(operands[0])
            before = self._event_of_second_dtype(operands)
        if earlier is not None and sum(1 for _ in earlier.chain()) >= _MAX_CHAIN:
            *_, earlier = earlier.chain()
        return TensorEvent(
            kind,
            dtype,
            name,
            calls,
            earlier=earlier,
            operand_dtypes=operand_dtypes,
            position=position,
            before=None if before is None else dataclasses.replace(before, before=None),
            data_type=data_type,
            region=region,
        )

    def _event_of_second_dtype(self, operands: Sequence[torch.Tensor]) -> TensorEvent | None:
        """Returns the event of the first operand that is a float of another dtype than the first
        float.
        """
        floats = [operand for operand in operands if operand.is_floating_point()]
        others = [operand for operand in floats if operand.dtype != floats[0].dtype]
        return self._event_or_outside(others[0]) if others else None

    def _record_setter(self, func: Any, args: Any) -> None:
        """Records an assignment such as `parameter.data = value`."""
        if len(args) < 2 or not isinstance(args[1], torch.Tensor) or args[0].dtype != args[1].dtype:
            return
        if isinstance(args[0], nn.Parameter):
            if getattr(func, "__self__", None) is _DATA:
                calls = read_calls(sys._getframe(1))
                self._assignments[args[0]] = TensorEvent("cast", args[0].dtype, "data", calls)
            return
        event = self.event_of(args[1])
        if event is not None and args[0] is not args[1]:
            self._events[args[0]] = event

    # ---- functions that do not call the mode
    def _record_from_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def from_numpy(array: Any) -> torch.Tensor:
            result: torch.Tensor = original(array)
            calls = read_calls(sys._getframe(1))
            self._events[result] = TensorEvent(
                "creation", result.dtype, "from_numpy", calls, data_type=str(array.dtype)
            )
            return result

        return from_numpy

    def _record_region(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(region: Any) -> Any:
            result = original(region)
            self._regions.append(read_calls(sys._getframe(1)))
            return result

        return enter

    def _record_region_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(
            region: Any, kind: Any, error: BaseException | None, traceback: TracebackType | None
        ) -> Any:
            if self._regions:
                self._regions.pop()
            return original(region, kind, error, traceback)

        return leave

    def _record_inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Switches the mode on while a function runs."""

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            if not self.is_recording or _get_current_function_mode() is self:
                return function(*args)
            self.__enter__()
            try:
                return function(*args)
            finally:
                if _get_current_function_mode() is self:
                    self.__exit__(None, None, None)

        return run

    def _wrap_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `torch.compile`. A library may compile functions that the program never calls, such
        as bitsandbytes while it is imported: for a library, the call of the function counts.
        """

        @functools.wraps(original)
        def compile_code(*args: Any, **kwargs: Any) -> Any:
            if not is_library_file(sys._getframe(1).f_code.co_filename):
                self._meet_compiled_code()
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            if args or kwargs.get("model") is not None:
                return self._observe_compiled(result)
            return lambda function: self._observe_compiled(result(function))  # a decorator

        return compile_code

    def _observe_compiled(self, compiled: Any) -> Any:
        """Returns compiled code that ends or marks the record when it is called first."""
        if not isinstance(compiled, FunctionType):
            self._meet_compiled_code()  # such as a module
            return compiled

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._meet_compiled_code()
            return compiled(*args, **kwargs)

        return run

    def _meet_compiled_code(self) -> None:
        """Notes that the program compiles code."""
        self.has_compiled = True

    def _record_unpacking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the constructor of the hooks with which a checkpoint computes its forward again."""

        @functools.wraps(original)
        def initialise(hooks: Any, pack_hook: Any, unpack_hook: Any) -> None:
            original(hooks, pack_hook, self._record_inside(unpack_hook))

        return initialise


def _find_example(calls: Sequence[RunningCode], frame: FrameType | None) -> torch.Tensor | None:
    from .dtype_examples import find_example  # most programs need these modules only after an error

    return find_example(calls, frame)


def _has_number_dtype(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.bool


def _is_in_library(calls: tuple[RunningCode, ...]) -> bool:
    return bool(calls) and is_library_file(calls[0].code.co_filename)


def _is_cast_back(event: TensorEvent, dtype: torch.dtype, calls: tuple[RunningCode, ...]) -> bool:
    """True if a library's function casts a tensor back to the dtype that it had before the function
    cast it.
    """
    if event.before is None or event.before.dtype != dtype or not _is_in_library(calls):
        return False
    return bool(event.calls) and event.calls[0].code is calls[0].code


def _has_same_precision(dtype: torch.dtype, other: torch.dtype) -> bool:
    """True if one dtype is the complex form of the other."""
    if dtype.is_complex == other.is_complex:
        return False
    return dtype.to_real() == other.to_real()


def _is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype != other and (dtype.is_floating_point or dtype.is_complex)


def _iterate_tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth <= _MAX_DEPTH and isinstance(value, (tuple, list)):
        for item in value[:_MAX_ITEMS]:
            yield from _iterate_tensors(item, depth + 1)
    elif depth <= _MAX_DEPTH and type(value) is dict:
        for item in list(value.values())[:_MAX_ITEMS]:
            yield from _iterate_tensors(item, depth + 1)
