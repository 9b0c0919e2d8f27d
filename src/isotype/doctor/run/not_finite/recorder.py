"""Records the calls of each step with their inputs, and checks the loss, the gradients and the
update of the step.

A call of the model, with everything inside it, is recorded as one entry. Functions that are called
outside of modules, such as a loss, are recorded one by one. The entries are deleted after each
backward, so that they do not keep autograd's graph alive.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ....finding import Finding
from ....observe.origin import (
    Site,
    innermost_site,
    is_library_file,
    is_tool_file,
    read_statement,
    running_frames,
)
from ..graph import read_grad_fn
from ..replacements import Replacement
from .buffers import Buffer, BufferRecord
from .lost_numbers import find_expression, is_near_integer
from .positions import find_position
from .replay import CONSTANT_WRITERS
from .report import (
    explain_buffer,
    explain_call,
    explain_function,
    explain_gradients,
    explain_step,
    explain_update,
)
from .step import (
    Entry,
    Step,
    all_finite,
    collect_gradients,
    collect_tensors,
    is_plain_attribute,
)

_MAX_ENTRIES = 512  # of one step; a program without backward must not collect entries
_MAX_VALUES = 65536  # of a result that takes no part in autograd; it is kept until backward
_MAX_FROZEN_VALUES = 2**22  # of a result of a frozen module, such as the latents of a VAE
_MAX_RECENT = 16  # calls of functions that are kept in a program without steps
# methods with which a program reads the values of a tensor, for example to print them
_READING_METHODS = frozenset(
    ("item", "tolist", "numpy", "__float__", "__format__", "__repr__", "__array__")
)
_CHECKS = frozenset(("isfinite", "isnan", "isinf", "isposinf"))
# errors about values, such as those of torch.multinomial, torch.distributions and int(nan)
_REFUSAL = re.compile(
    r"\b(nan|infs?|infinit[ey]|finite)\b|isfinite|isnan|satisfy the constraint", re.I
)
_ANOMALY = "returned nan values in its"  # in the error of autograd's anomaly mode
_MAX_SKIPPED_STEPS = 25  # a loss scaler halves its scale of 65536 to 1 in 16 steps


# files whose frames lie between an operator and the line of the program that called it
_RECORDER_FILES = (__file__, torch.overrides.__file__)


class NotFiniteError(ArithmeticError):
    """This exception is raised in the program at the first step whose loss, gradients or update
    contain NaN or inf. The attribute `finding` of the exception explains this step.
    """

    def __init__(self, message: str, finding: Finding) -> None:
        super().__init__(message)
        self.finding = finding


class Recorder(TorchFunctionMode):
    """Records and checks the steps of the program.

    number     the number of the current step, which is the number of finished updates plus one
    suspect    the step of the last backward that produced gradients with NaN or inf
    has_step   whether the program has called backward or updated weights
    bad_call   the first call of a module without a gradient whose result contains NaN or inf, or of
               a function whose NaN or inf the program has read, since the last step
    earlier_bad_call  the last such call before a step, such as one that samples actions
    checked_call  the first call of a function whose NaN or inf the program has tested for, such as
               with isfinite; it is explained only if the program ends with an error
    recent     the last calls of functions outside of modules, in such a program
    sources    tensor with NaN or inf -> the call of a function that made the first of them
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: deque[Entry] = deque()
        self.number = 1
        self.suspect: Step | None = None
        self.has_step = False
        self.bad_call: Entry | None = None
        self.earlier_bad_call: Entry | None = None
        self.checked_call: Entry | None = None
        self.recent: deque[Entry] = deque(maxlen=_MAX_RECENT)
        self.sources = WeakTensorKeyDictionary()
        self.scaler: torch.amp.GradScaler | None = None
        self.skipped_steps = 0
        self.updates = 0
        self.depth = 0
        self.thread = get_ident()
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.buffers = BufferRecord()
        self._is_popped = False
        self._owners: dict[tuple[int, Site | None], str] = {}
        self._numbers: dict[tuple[Site | None, float], str] = {}
        self._restorers: list[Any] = []

    # start and stop

    def install(self) -> None:
        """Starts recording in this thread."""
        self._patch(nn.Module, "__call__", self._wrap_module_call)
        self._patch(torch.autograd, "backward", self._wrap_backward)
        self._patch(torch.amp.GradScaler, "scale", self._wrap_scale)
        self._patch(torch.amp.GradScaler, "step", self._wrap_scaler_step)
        self._wrap_apply()
        self._patch(warnings, "showwarning", self._wrap_showwarning)
        self._restorers += [
            register_optimizer_step_pre_hook(self._check_gradients).remove,
            register_optimizer_step_post_hook(self._check_update).remove,
        ]
        _push_mode(self)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.uninstall)

    def uninstall(self) -> None:
        """Removes every hook. A second call of this method has no effect."""
        self.depth += 1  # where the mode cannot be removed, it records nothing any more
        for restore in self._restorers:
            restore()
        self._restorers.clear()
        self.entries.clear()
        self.recent.clear()
        self.sources.clear()
        self.suspect = None
        self._pop()

    def _patch(self, owner: Any, name: str, wrap: Any) -> None:
        self._restorers.append(Replacement.make(owner, name, wrap).undo)

    def _pop(self) -> bool:
        """Removes this mode from PyTorch's stack of modes, if it is the innermost mode."""
        count = torch._C._len_torch_function_stack()
        if not count or torch._C._get_function_stack_at(count - 1) is not self:
            return False
        _pop_mode()
        return True

    @property
    def is_paused(self) -> bool:
        """True if nothing is recorded at the moment. Nothing is recorded inside a module, in
        backward, and in other threads.
        """
        return self.depth > 0 or get_ident() != self.thread

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.depth += 1
        was_popped = self._pop()
        try:
            yield
        finally:
            self.depth -= 1
            if was_popped:
                _push_mode(self)

    # recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused or is_plain_attribute(func):
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            with self.pause():
                self._note_refused_values(args, kwargs)
            raise
        written = args[0] if func is Tensor.__setitem__ else result
        with suppress(Exception):  # the program must not end because of its record
            if not self.has_step and self.bad_call is None:
                with self.pause():
                    self._follow_values(func, args, kwargs, written)
            if torch.is_grad_enabled() or _count_values((args, kwargs)) <= _MAX_VALUES:
                self._record(func, args, kwargs, written)
        return result

    def _note_refused_values(self, args: Any, kwargs: Any) -> None:
        """Keeps the call that made NaN or inf which a function refuses, as multinomial does."""
        tensors = collect_tensors((args, kwargs))
        sources = [self.sources[tensor] for tensor in tensors if tensor in self.sources]
        if sources and self.bad_call is None:
            self.bad_call = sources[0]

    def _follow_values(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follows NaN and inf from the function that makes them to the line that reads them. An
        intermediate result, such as a quotient that `torch.where` replaces, is no fault.
        """
        inputs = [t for t in collect_tensors((args, kwargs)) if t.is_floating_point()]
        sources = [self.sources[tensor] for tensor in inputs if tensor in self.sources]
        if function.__name__ in _READING_METHODS:
            if sources and any(_has_bad_values(tensor) for tensor in inputs):
                self.bad_call = sources[0]
            return
        if sources and function.__name__ in _CHECKS:
            self.checked_call = self.checked_call or sources[0]
        outputs = [tensor for tensor in collect_tensors(result) if tensor.is_floating_point()]
        if not outputs or sum(tensor.numel() for tensor in [*inputs, *outputs]) > _MAX_VALUES:
            return
        entry = self._make_entry(function, args, kwargs, outputs)
        self.recent.append(entry)
        if all_finite(outputs):
            return
        is_constant = entry.name.rstrip("_") in CONSTANT_WRITERS or not inputs
        if not sources and not is_constant and not any(map(_has_bad_values, inputs)):
            sources = [entry]
        for tensor in outputs if sources else ():
            self.sources[tensor] = sources[0]

    def _record(
        self, function: Any, args: Any, kwargs: Any, result: Any, state: Any = None
    ) -> None:
        outputs = [tensor for tensor in collect_tensors(result) if tensor.is_floating_point()]
        if not torch.is_grad_enabled() and any(_is_view_of_weight(tensor) for tensor in outputs):
            return
        takes_part = any(read_grad_fn(tensor) is not None for tensor in outputs)
        limit = _MAX_FROZEN_VALUES if isinstance(function, nn.Module) else _MAX_VALUES
        is_small = sum(tensor.numel() for tensor in outputs) <= limit
        if outputs and (takes_part or is_small):
            entry = self._make_entry(function, args, kwargs, outputs, state)
            if len(self.entries) == _MAX_ENTRIES:
                # calls without a gradient, such as those of a sampling loop, are removed first
                del self.entries[self._index_without_gradient()]
            self.entries.append(entry)

    def _make_entry(
        self, function: Any, args: Any, kwargs: Any, outputs: list[Tensor], state: Any = None
    ) -> Entry:
        site, instruction = find_position() or (None, -1)
        owner = self._find_owner(function, site) if isinstance(function, nn.Module) else ""
        numbers = self._find_numbers(args, kwargs, site)
        return Entry(
            function,
            args,
            kwargs,
            outputs,
            _autocast_dtypes(),
            site,
            state,
            owner,
            numbers,
            instruction,
        )

    def _index_without_gradient(self) -> int:
        indices = (index for index, entry in enumerate(self.entries) if not entry.takes_part)
        return next(indices, 0)

    def _find_numbers(self, args: Any, kwargs: Any, site: Site | None) -> dict[float, str]:
        """Returns the program's expressions for the numbers among the arguments that a dtype may
        round away. Their variables exist only during the call.
        """
        numbers = [value for value in (*args, *kwargs.values()) if is_near_integer(value)]
        for value in numbers:
            if (site, value) not in self._numbers:
                self._numbers[site, value] = find_expression(value, site)
        return {value: self._numbers[site, value] for value in numbers}

    def _check_call(
        self, module: nn.Module, args: Any, kwargs: Any, result: Any, state: dict[str, Tensor]
    ) -> None:
        """Keeps the first call whose result contains NaN or inf, in a program for inference or between
        the steps of training. `-inf` is usual in the scores of tokens that are excluded.
        """
        outputs = [tensor for tensor in collect_tensors(result) if tensor.is_floating_point()]
        if all_finite(outputs):
            return
        if not any(_has_bad_values(tensor) for tensor in outputs):
            return
        inputs = collect_tensors((args, kwargs))
        sources = [self.sources[tensor] for tensor in inputs if tensor in self.sources]
        if sources:
            self.bad_call = sources[0]
            return
        site = innermost_site()
        owner = self._find_owner(module, site)
        autocast = _autocast_dtypes()
        self.bad_call = Entry(module, args, kwargs, outputs, autocast, site, state, owner)

    def _find_owner(self, module: nn.Module, site: Site | None) -> str:
        key = (id(module), site)
        if key not in self._owners:
            self._owners[key] = _read_owner(module)
        return self._owners[key]

    def _wrap_module_call(self, original: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_paused:
                return original(module, *args, **kwargs)
            state = _random_state()
            with suppress(Exception):
                self.buffers.add(module)
            with self.pause():
                result = original(module, *args, **kwargs)
            with suppress(Exception):  # the program must not end because of its record
                self._record_module_call(module, args, kwargs, result, state)
            return result

        return call

    def _record_module_call(
        self, module: nn.Module, args: Any, kwargs: Any, result: Any, state: Any
    ) -> None:
        is_trained = any(p.requires_grad for p in module.parameters())
        is_sampled = is_trained and not torch.is_grad_enabled()
        if self.bad_call is None and (is_sampled or not self.has_step):
            with self.pause():
                self._check_call(module, args, kwargs, result, state)
        if torch.is_grad_enabled():
            self.models.add(module)
        if not is_sampled:
            self._record(module, args, kwargs, result, state)

    def _wrap_showwarning(self, original: Any) -> Any:
        """Corrects the location of a warning that an operator raises. The operator is called by the
        recorder, so Python takes the recorder's line for the line of the program.
        """

        def showwarning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: str | None = None,
        ) -> None:
            if filename in _RECORDER_FILES:
                filename, lineno = _program_location(filename, lineno)
            original(message, category, filename, lineno, file, line)

        return showwarning

    def _wrap_apply(self) -> None:
        """Records calls of autograd Functions. PyTorch does not report calls of `apply` to function
        modes.
        """
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            function = original.__get__(None, cls)
            if self.is_paused:
                return function(*args, **kwargs)
            with self.pause():
                result = function(*args, **kwargs)
            if torch.is_grad_enabled():
                with suppress(Exception):
                    self._record(function, args, kwargs, result)
            return result

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        self._restorers.append(lambda: setattr(torch.autograd.Function, "apply", original))

    # checks

    def _wrap_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_paused:
                return original(tensors, *args, **kwargs)
            self._note_step()
            losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            written = self._list_written_buffers()
            gradients = args[0] if args else kwargs.get("grad_tensors")
            step = self._make_step(losses, gradients, written)
            if not all_finite(losses):
                self._stop(step, "the loss is not finite")
            try:
                with self.pause():
                    result = original(tensors, *args, **kwargs)
            except RuntimeError as error:
                self.suspect = step if _ANOMALY in str(error) else self.suspect
                raise
            if not all_finite(collect_gradients(step.entries)):
                self.suspect = step
            buffer = self._find_bad_buffer(written)
            if buffer is not None:
                with self._stopped():
                    finding = explain_buffer(step, buffer)
                message = f"step {step.number}: {buffer.name} is not finite"
                raise NotFiniteError(message, finding)
            if not kwargs.get("retain_graph"):
                self.entries.clear()
            return result

        return backward

    def _note_step(self) -> None:
        self.has_step = True
        self.earlier_bad_call = self.bad_call or self.earlier_bad_call
        self.bad_call = None
        self.checked_call = None
        self.recent.clear()
        self.sources.clear()

    def finish(self, error: BaseException | None = None) -> Finding | None:
        """Ends the recording of a program that ended by itself. Returns the finding about the first
        call whose result contains NaN or inf, if the program had no step.

        error  the exception that ended the program, or None. A program that ends with an error in
               or after a step may have checked its loss: then the step is explained.
        """
        call = self.bad_call
        step = None
        if error is not None:
            call = call or self.checked_call
            with self.pause():
                if self.has_step:
                    is_refused = _refuses_values(error)
                    call = (self._find_function_call() or call) if is_refused else None
                step = self._find_failed_step(error)
        earlier = [*self.recent, *self.entries]
        written = self._list_written_buffers()
        buffer = self._find_bad_buffer(written) if error is None else None
        self.uninstall()
        if call is not None and call.is_module:
            return explain_call(call, _tensor_ids(written))
        if call is not None:
            return explain_function(call, earlier)
        if buffer is not None:
            return explain_buffer(Step([], [], [], self.number), buffer)
        return None if step is None else explain_step(step)

    def _find_bad_buffer(self, written: list[Buffer]) -> Buffer | None:
        with suppress(Exception):  # the program must not end because of its record
            return self.buffers.check(written)
        return None

    def _list_written_buffers(self) -> list[Buffer]:
        with suppress(Exception):
            return self.buffers.list_written()
        return []

    def _find_failed_step(self, error: BaseException) -> Step | None:
        """Returns the step whose loss or gradients the program or autograd's anomaly mode has found
        to be not finite, before an error.
        """
        if self.suspect is not None and _ANOMALY in str(error):
            return self.suspect
        results = [
            tensor
            for entry in self.entries
            for tensor in entry.outputs
            if read_grad_fn(tensor) is not None and not all_finite([tensor])
        ]
        losses = [tensor for tensor in results if tensor.numel() == 1]
        if losses:
            return self._make_step(losses[-1:], None, self._list_written_buffers())
        # -inf is usual in masks
        results = [tensor for tensor in results if _has_bad_values(tensor)]
        if results and _refuses_values(error):
            return replace(self._make_step(results[-1:], None), quantity="result")
        return None

    def refuses(self, error: BaseException) -> bool:
        """Whether an error of the program is about NaN or inf."""
        return not isinstance(error, NotFiniteError) and _refuses_values(error)

    def _find_function_call(self) -> Entry | None:
        """Returns the first call of a function without a gradient, since the last step, that made
        NaN or inf from finite values.
        """
        entries = (x for x in self.entries if not x.is_module and not x.takes_part)
        return next((entry for entry in entries if _makes_bad_values(entry)), None)

    def _make_step(
        self, losses: list[Tensor], gradients: Any, written: Sequence[Buffer] = ()
    ) -> Step:
        if gradients is None or isinstance(gradients, Tensor):
            gradients = [gradients]
        scale = None if self.scaler is None else self.scaler.get_scale()
        return Step(
            list(self.entries),
            losses,
            list(gradients),
            self.number,
            scale,
            _tensor_ids(written),
            self.earlier_bad_call,
        )

    def _wrap_scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                self.scaler = scaler
            return original(scaler, outputs)

        return scale

    def _wrap_scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            updates = self.updates
            self.scaler = None
            result = original(scaler, optimizer, *args, **kwargs)
            if self.updates != updates or not scaler.is_enabled():
                self.skipped_steps = 0
                return result
            self.skipped_steps += 1
            suspect = self.suspect
            # a scaler that starts below 1 divides large gradients on purpose
            has_fallen = scaler.get_scale() <= 1 < getattr(scaler, "_init_scale", 2.0)
            is_stuck = has_fallen or self.skipped_steps > _MAX_SKIPPED_STEPS
            if suspect is not None and is_stuck:
                self._stop(suspect, f"the loss scaler has skipped {self.skipped_steps} steps")
            self.suspect = None
            return result

        return step

    def _check_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.suspect is None or all_finite(p.grad for p in parameters if p.grad is not None):
            self._is_popped = self._pop() or self._is_popped  # an update calls many functions
            return
        with self._stopped():
            finding = explain_gradients(parameters, self.suspect, self.scaler, list(self.models))
        raise NotFiniteError(f"step {self.number}: a gradient is not finite", finding)

    def _check_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused:
            return
        if self._is_popped:
            self._is_popped = False
            _push_mode(self)
        self._note_step()
        self.updates += 1
        self.suspect = None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all_finite(parameters):
            with self._stopped():
                finding = explain_update(optimizer, self.number, list(self.models))
            raise NotFiniteError(f"step {self.number}: the update is not finite", finding)
        self.number += 1

    def _stop(self, step: Step, quantity: str) -> None:
        with self._stopped():
            finding = explain_step(step)
        raise NotFiniteError(f"step {step.number}: {quantity}", finding)

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """Ends the recording, because only the first step with NaN or inf is explained."""
        suspect = self.suspect
        self.uninstall()
        self.suspect = suspect
        yield


def _tensor_ids(buffers: Sequence[Buffer]) -> frozenset[int]:
    return frozenset(id(buffer.tensor) for buffer in buffers)


def _count_values(value: Any) -> int:
    return sum(tensor.numel() for tensor in collect_tensors(value))


def _has_bad_values(tensor: Tensor) -> bool:
    """True if a tensor contains NaN or inf. `-inf` is usual in masks and in scores."""
    return bool((tensor.isnan() | (tensor == float("inf"))).any())


def _makes_bad_values(entry: Entry) -> bool:
    """Whether a function made NaN or inf from finite values, and is not one that writes a constant,
    such as the -inf of a mask.
    """
    inputs = collect_tensors((entry.args, entry.kwargs))
    if not inputs or entry.is_overwritten or entry.name.rstrip("_") in CONSTANT_WRITERS:
        return False
    return any(map(_has_bad_values, entry.outputs)) and all_finite(inputs)


def _refuses_values(error: BaseException) -> bool:
    """Whether an error is about NaN or inf: by its text, or by the line of an assertion."""
    text = str(error)
    traceback = error.__traceback__
    while isinstance(error, AssertionError) and traceback is not None:
        site = Site(traceback.tb_frame.f_code, traceback.tb_lineno)
        text = text if traceback.tb_next is not None else f"{text} {read_statement(site)}"
        traceback = traceback.tb_next
    return _REFUSAL.search(text) is not None


def _is_view_of_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a part of one that needs a gradient. Code that initialises weights makes
    such parts without gradients and writes into them; autograd then refuses to read their node.
    """
    return tensor._base is not None and tensor._base.requires_grad


def _read_owner(module: nn.Module) -> str:
    """Returns the expression with which the program names the module, or the model or pipeline that
    contains it, in the innermost line of the program's own code that does so. A user cannot change
    the dtype of one layer inside a library's model, but the dtype of the model.
    """
    for frame in running_frames():
        file = frame.f_code.co_filename
        if is_tool_file(file) or is_library_file(file):
            continue
        try:
            tree = ast.parse(read_statement(Site(frame.f_code, frame.f_lineno)).strip().rstrip(":"))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            value = _read_attribute(node, frame)
            if isinstance(value, nn.Module):
                if any(inner is module for inner in value.modules()):
                    return ast.unparse(node)
                continue
            for name, part in list(getattr(value, "__dict__", {}).items()):
                if isinstance(part, nn.Module) and any(inner is module for inner in part.modules()):
                    return f"{ast.unparse(node)}.{name}"
    return ""


def _read_attribute(node: ast.AST, frame: FrameType) -> Any:
    """Returns the value of a name, or of an attribute that is stored in an object. No code of the
    program runs.
    """
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute):
        return None
    owner = _read_attribute(node.value, frame)
    fields = getattr(owner, "__dict__", {})
    modules = fields.get("_modules") if isinstance(owner, nn.Module) else None
    if modules and node.attr in modules:
        return modules[node.attr]
    return fields.get(node.attr)


def _autocast_dtypes() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda", "mps")
        if torch.is_autocast_enabled(device)
    }


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _program_location(filename: str, line: int) -> tuple[str, int]:
    """Returns the file and line of the program that called an operator through the recorder. If the
    recorder did not call it, returns the given file and line.
    """
    frame: FrameType | None = sys._getframe(2)  # the frame that called `showwarning`
    while frame is not None and frame.f_code.co_filename not in _RECORDER_FILES:
        frame = frame.f_back
    function = ""
    while frame is not None and frame.f_code.co_filename in _RECORDER_FILES:
        function = frame.f_code.co_name
        frame = frame.f_back
    if frame is not None and function == "handle_torch_function":
        frame = frame.f_back  # a function of torch that PyTorch calls again through the recorder
    return (filename, line) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
