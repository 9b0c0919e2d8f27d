"""Records the calls that build, load and cast the weights of modules, that load the states of an
optimizer, and that set the default dtype, while a program runs. After an error, the record shows
which line of the program gave a weight or a state its dtype, also if the function of this line has
returned.

A call costs time only when a program registers a parameter or a buffer, casts or moves a module, or
loads states.
This module does not import torch, so that a program starts without delay.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from .replacements import Replacement
from .running_code import RunningCode, read_calls

if TYPE_CHECKING:
    from .tensor_record import TensorRecord

_MAX_DEFAULT_DTYPES = 64  # calls of `torch.set_default_dtype` that are kept, the last ones
_MAX_EVENTS = 4  # events that are kept for a weight; the first and the last ones


@dataclass(frozen=True, slots=True, eq=False)
class WeightEvent:
    """A call that registered a weight, or changed its dtype.

    is_cast        whether the weight existed before in another dtype
    default_dtype  the default dtype of PyTorch at this time
    calls          the frames that do not belong to PyTorch, the innermost first
    """

    is_cast: bool
    dtype: Any
    default_dtype: Any
    calls: tuple[RunningCode, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DefaultDtypeEvent:
    """A call of `torch.set_default_dtype`.

    calls  the frames that do not belong to PyTorch, the innermost first
    """

    dtype: Any
    calls: tuple[RunningCode, ...]


class WeightRecord:
    """Holds the events of each parameter and buffer of the modules that a program builds. It does
    not keep the modules alive.

    tensors  the record of all tensors: of the whole program with `--trace`, of its first steps with
             `doctor run`, and otherwise None
    """

    def __init__(self) -> None:
        self.tensors: TensorRecord | None = None
        self._includes_first_steps = False
        self._events: MutableMapping[Any, dict[str, list[WeightEvent]]] = {}
        self._state = threading.local()
        self._loads: MutableMapping[Any, tuple[RunningCode, ...]] = {}
        self._replacements: list[Replacement] = []
        self._default_dtypes: deque[DefaultDtypeEvent] = deque(maxlen=_MAX_DEFAULT_DTYPES)
        self._torch: Any = None

    @property
    def is_complete(self) -> bool:
        """Whether there is a record of all tensors from the start of the program until now."""
        return self.tensors is not None and self.tensors.is_complete

    def install_with_first_steps(self) -> None:
        """Starts to record, also all tensors of the program's first steps."""
        self._includes_first_steps = True
        self.install()

    def install(self) -> None:
        """Starts to record. If torch is not imported yet, starts after its import."""
        if self._replacements:
            return
        if "torch" not in sys.modules:
            if not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
                sys.meta_path.insert(0, _TorchFinder(self))
            return
        import torch
        from torch.utils.weak import WeakIdKeyDictionary

        self._torch = torch
        self._events, self._loads = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._replacements = [
            Replacement.make(torch.nn.Module, "_apply", self._record_cast),
            Replacement.make(torch.nn.Module, "register_parameter", self._record_registration),
            Replacement.make(torch.nn.Module, "register_buffer", self._record_registration),
            Replacement.make(torch.optim.Optimizer, "load_state_dict", self._record_load),
            Replacement.make(torch, "set_default_dtype", self._record_default_dtype),
        ]
        if self._includes_first_steps:
            from .first_steps import FirstStepsRecord

            self.tensors = FirstStepsRecord()
            self.tensors.install()

    def record_tensors(self) -> None:
        """Imports torch and also starts the record of all tensors."""
        from .tensor_record import TensorRecord

        self.install()
        self.tensors = TensorRecord()
        self.tensors.install()

    def remove(self) -> None:
        """Stops to record, and forgets all events."""
        if self.tensors is not None:
            self.tensors.remove()
            self.tensors = None
        for replacement in self._replacements:
            replacement.undo()
        self._replacements = []
        self._default_dtypes.clear()
        self._events, self._loads = {}, {}
        self._includes_first_steps = False

    def events_of(self, module: Any) -> dict[str, list[WeightEvent]]:
        """Returns the events of the parameters and buffers that a module owns, by their names. The
        oldest event comes first.
        """
        return self._events.get(module, {})

    def events_of_tensor(self, tensor: Any) -> list[WeightEvent]:
        """Returns the events of a parameter or buffer, the oldest first."""
        for module, events in self._events.items():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is tensor:
                        return events.get(name, [])
        return []

    def last_load_of(self, optimizer: Any) -> tuple[RunningCode, ...]:
        """Returns the frames of the last call that loaded the states of an optimizer, the innermost
        first, or an empty tuple.
        """
        return self._loads.get(optimizer, ())

    @property
    def default_dtype_events(self) -> list[DefaultDtypeEvent]:
        """The last calls of `torch.set_default_dtype`, the oldest first."""
        return list(self._default_dtypes)

    def _record_default_dtype(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_default_dtype(d: Any) -> None:  # the name of the argument in PyTorch
            original(d)
            with suppress(Exception):  # the program must not end because of its record
                self._default_dtypes.append(DefaultDtypeEvent(d, read_calls(sys._getframe(1))))

        return set_default_dtype

    def _record_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            with suppress(Exception):  # the program must not end because of its record
                self._loads[optimizer] = read_calls(sys._getframe(1))

        return load_state_dict

    def _record_cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Module._apply`, with which `to`, `half`, `float` and the like cast a module."""

        @functools.wraps(original)
        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._state, "is_casting", False):
                return original(module, *args, **kwargs)  # a part of the module that is cast
            before: list[tuple[Any, str, Any]] = []
            with suppress(Exception):  # the program must not end because of its record
                before += [(*key, tensor.dtype) for key, tensor in _iterate_weights(module)]
            self._state.is_casting = True
            try:
                return original(module, *args, **kwargs)
            finally:
                self._state.is_casting = False
                with suppress(Exception):
                    self._add_casts(before)

        return _apply

    def _add_casts(self, before: list[tuple[Any, str, Any]]) -> None:
        event = None
        for owner, name, dtype in before:
            tensor = _read_weight(owner, name)
            if tensor is None or tensor.dtype == dtype:
                continue
            if event is None or event.dtype != tensor.dtype:
                event = self._make_event(tensor.dtype, sys._getframe(1), is_cast=True)
            self._add(owner, name, event)

    def _record_registration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Module.register_parameter` or `Module.register_buffer`."""

        @functools.wraps(original)
        def register(module: Any, name: str, *args: Any, **kwargs: Any) -> None:
            original(module, name, *args, **kwargs)
            with suppress(Exception):
                self._add_registration(module, name, _read_weight(module, name))

        return register

    def _add_registration(self, module: Any, name: str, tensor: Any) -> None:
        if tensor is not None and tensor.is_floating_point():
            event = self._make_event(tensor.dtype, sys._getframe(1), is_cast=False)
            self._add(module, name, event)

    def _make_event(self, dtype: Any, frame: FrameType | None, *, is_cast: bool) -> WeightEvent:
        default_dtype = self._torch.get_default_dtype()
        return WeightEvent(is_cast, dtype, default_dtype, read_calls(frame))

    def _add(self, module: Any, name: str, event: WeightEvent) -> None:
        events = self._events.setdefault(module, {}).setdefault(name, [])
        if len(events) == _MAX_EVENTS:
            events.pop(1)
        events.append(event)


RECORD = WeightRecord()


def _read_weight(module: Any, name: str) -> Any:
    """Returns a parameter or buffer of a module. The tables of a TorchScript module have no method
    `get`.
    """
    return {**dict(module._parameters.items()), **dict(module._buffers.items())}.get(name)


def _iterate_weights(module: Any) -> Iterator[tuple[tuple[Any, str], Any]]:
    """Yields each floating-point parameter and buffer of a module, with its owner and its name."""
    for owner in module.modules():
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is not None and tensor.is_floating_point():
                yield (owner, name), tensor


class _TorchFinder:
    """Finds torch where the other finders of `sys.meta_path` find it, and starts the record at the
    end of its import.
    """

    def __init__(self, record: WeightRecord) -> None:
        self.record = record

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            self.record.install()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec
