"""The tracer observes every op, every call of a torch function, and the hooks of modules.

Each op runs once and its result is returned unchanged. While the program repeats the same forwards
and steps, the tracer switches its PyTorch modes off (`WatchSchedule`). The tracer tells the
watchers what happens in the program, and each watcher detects one kind of fault. The tracer is also
the `Context` object from which the watchers read the state of the trace.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...finding import Finding
from ...observe.operators import FLOATS, Operator, floating_operands
from ...observe.origin import innermost_site
from ...observe.tape import FunctionTape, ModuleCall, Tape, mark_observing
from .context import EVENTS, Context, Watcher, is_due
from .failures import Failures
from .origin import Origin, Provenance
from .parameters import BlockedGradients, DequantisedLayers, Parameters
from .process import Autocast, CompiledRegions, DefaultDtype
from .promotions import EngineCasts, Promotions
from .ranges import LogProbs, Overflows, Positions
from .updates import Sums, Updates

# in the order of their findings
_WATCHERS: tuple[type[Watcher], ...] = (
    DefaultDtype,
    Autocast,
    Parameters,
    Updates,
    Sums,
    Promotions,
    EngineCasts,
    Positions,
    Overflows,
    BlockedGradients,
    DequantisedLayers,
    LogProbs,
    CompiledRegions,
)

# the maximum number of autograd nodes whose forward line is stored; a step creates a few thousand
_MAX_SITES = 20_000

# The first forwards of a kind, and the first steps of an optimizer, are watched. Later only those
# whose number is a power of two or a multiple of the period are watched, to find faults that appear
# late.
FIRST_WATCHED = 8
SAMPLE_PERIOD = 64
_NEW_SIZE_FORWARDS = 2  # watched forwards for new sizes of the inputs
# limits for the depth and the number of items of nested inputs that are compared
_MAX_DEPTH = 3
_MAX_ITEMS = 16


class WatchSchedule:
    """Counts the forwards and steps of each kind. If the program repeats forwards or steps of the
    same kind, the schedule switches the tracer off for most of them.

    The tracer uses PyTorch's modes, which call Python code for every op. Most of the time of a
    trace is spent in these calls. So only the first eight forwards of each kind are watched. Most
    later forwards of this kind, their backwards and the optimizer steps run without the modes and
    hooks. Code of the program outside of forwards, backwards and steps (losses, metrics, averages,
    assignments, casts) is always watched. A forward is also watched while the program adds up a
    low-precision sum over several forwards. If a dtype error occurs in an unwatched forward, this
    forward runs again with the tracer to explain the error.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counts: Counter[Any] = Counter()
        self._forward_number = 0  # number of the running forward within its kind
        # whether a forward since the last backward was not watched
        self._has_unwatched_forward = False
        self.is_forward_unwatched = False  # whether the last forward was not watched
        self._end_hook: Any = None  # the hook at the end of an unwatched forward
        # end hooks of failed forwards; they are removed later, because torch was iterating over the
        # hooks
        self._finished_hooks: list[Any] = []

    @property
    def is_sampled(self) -> bool:
        """True if the running forward is watched as a sample. The first forwards are all watched,
        and a few of the later ones.
        """
        return self._forward_number > FIRST_WATCHED and _is_sampled(self._forward_number)

    @property
    def checks_values(self) -> bool:
        """True if the tracer checks not only dtypes but also values in the running forward.
        Checking values takes more time.
        """
        return self._forward_number <= FIRST_WATCHED // 2 or self.is_sampled

    def reset(self) -> None:
        """Resets all counts. The counts are reset after an error, and after the dtype of a
        parameter has changed.
        """
        self._counts.clear()

    # ---- forwards
    def start_forward(self, module: torch.nn.Module, args: tuple) -> bool:
        """Called at the start of each forward of a model. Returns True if this forward will not be
        watched.
        """
        while self._finished_hooks:
            self._finished_hooks.pop().remove()
        # the keyword arguments of Module.__call__, which a global forward pre-hook does not receive
        kwargs = sys._getframe(2).f_locals.get("kwargs", {})
        kind, sizes = self._forward_key(module, args, kwargs)
        self._counts[kind] += 1
        self._counts[kind, sizes] += 1
        self._forward_number = self._counts[kind]
        self.is_forward_unwatched = False
        if (
            self._forward_number <= FIRST_WATCHED
            or _is_sampled(self._forward_number)
            or self._counts[kind, sizes] <= _NEW_SIZE_FORWARDS
            or self._context.sums.is_growing()
        ):
            return False
        recomputes = torch._C._current_autograd_node() is not None
        if (
            recomputes
            or isinstance(module, torch.jit.ScriptModule)
            or not self._context.suspend(hooks=True)
        ):
            return False
        self._has_unwatched_forward = self.is_forward_unwatched = True
        self._end_hook = module.register_forward_hook(
            self._end_forward, with_kwargs=True, always_call=True
        )
        return True

    def _end_forward(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self._end_hook is None:
            return
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            self._finished_hooks.append(self._end_hook)
            self._end_hook = None
        self._context.resume()
        if isinstance(error, Exception):
            self.reset()
            self._context.failures.rerun_forward(error, module, args, kwargs)

    def on_resume(self) -> None:
        if self._end_hook is not None:
            self._end_hook.remove()
            self._end_hook = None

    def stop(self) -> None:
        while self._finished_hooks:
            self._finished_hooks.pop().remove()

    def _forward_key(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """Returns a key that is the same for all forwards of the same kind. Also returns the sizes
        of the inputs, rounded up to powers of two. Two forwards are of the same kind if module,
        mode, autocast and the dtypes of the inputs are the same.
        """
        device = self._context.device
        sizes = []

        def describe_value(value: Any, depth: int = 0) -> Any:
            if isinstance(value, torch.Tensor):
                sizes.append(tuple((length - 1).bit_length() for length in value.shape))
                return value.dtype, value.requires_grad
            if isinstance(value, dict) and depth < _MAX_DEPTH:
                return tuple(
                    (key, describe_value(item, depth + 1))
                    for key, item in list(value.items())[:_MAX_ITEMS]
                )
            if isinstance(value, (tuple, list)) and depth < _MAX_DEPTH:
                return tuple(describe_value(item, depth + 1) for item in value[:_MAX_ITEMS])
            if value is None or isinstance(value, (bool, str)):
                return value
            return type(value)

        if torch.is_autocast_enabled(device):
            cast_dtype = torch.get_autocast_dtype(device)
        else:
            cast_dtype = None
        state = (
            id(module),
            module.training,
            torch.is_grad_enabled(),
            cast_dtype,
            torch.get_default_dtype(),
        )
        return (state, describe_value(args), describe_value(kwargs)), tuple(sizes)

    # ---- backwards, and steps of an optimizer
    def should_skip_backward(self) -> bool:
        """Called when a backward begins. Returns True if the backward should not be watched. If a
        forward was not watched, its backward is not watched either, because the origins of the
        forward's tensors are unknown.
        """
        should_skip = self._has_unwatched_forward
        self._has_unwatched_forward = False
        return should_skip

    def should_skip_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """Called when an optimizer step begins. Returns True if the step should not be watched. A
        step with a closure is always watched, because the closure runs forwards.
        """
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        kind = (
            id(optimizer),
            frozenset((p.dtype, p.grad.dtype) for p in parameters if p.grad is not None),
        )
        self._counts[kind] += 1
        is_watched = self._counts[kind] <= FIRST_WATCHED or _is_sampled(self._counts[kind])
        return not is_watched and not any(
            callable(argument) for argument in (*args[1:], *kwargs.values())
        )


def _is_sampled(number: int) -> bool:
    return is_due(number, 0) or not number % SAMPLE_PERIOD


class Tracer(Context):
    """Records the origin of every floating-point tensor, and tells the watchers what happens in the
    program.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.provenance = Provenance(self)
        self.failures = Failures(self)
        self.schedule = WatchSchedule(self)
        self._watchers = {kind: kind(self) for kind in _WATCHERS}
        self.autocast, self.defaults, self.parameters = (
            self._watchers[kind] for kind in (Autocast, DefaultDtype, Parameters)
        )
        self.sums = self._watchers[Sums]
        self.promotions = self._watchers[Promotions]
        # event -> the methods of the watchers that handle it
        self._events = {
            event: [
                getattr(watcher, event)
                for watcher in self._watchers.values()
                if event in vars(type(watcher))
            ]
            for event in EVENTS
        }
        self._op_hooks = {
            name: hooks
            for watcher in self._watchers.values()
            for name, hooks in watcher.op_hooks().items()
        }
        self.op_count = 0  # the number of watched ops
        self._hooks: list[Any] = []
        self._running = ExitStack()
        self._module_hooks: list[Any] = []
        self._tape = Tape(self._run_op, on_new_operator=self._attach_hooks)
        self._calls = FunctionTape(self._run_call)
        # set while the dispatch mode is off: whether the function mode and the module hooks are off
        # too
        self._suspended: tuple[bool, bool] | None = None
        if model is not None:
            self.register_model(model)

    # ---- lifetime
    def __enter__(self) -> Tracer:
        self._hook_modules()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for part in (self.provenance, *self._watchers.values()):
            self._running.enter_context(part.activate())
        self._calls.__enter__()
        self._tape.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.resume()
        self.schedule.stop()
        self._tape.__exit__(kind, error, traceback)
        self._calls.__exit__(kind, error, traceback)
        self._running.close()
        for hook in (*self._hooks, *self._module_hooks):
            hook.remove()

    def _hook_modules(self) -> None:
        modules = torch.nn.modules.module
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def suspend(self, *, hooks: bool) -> bool:
        """Switches the modes off until `resume` is called. If `hooks` is true, the hooks of modules
        are removed too. If the modes are off already, or if the program has activated another mode
        after them, returns False and changes nothing.
        """
        if self._suspended is not None or _get_current_dispatch_mode() is not self._tape:
            return False
        self._tape.__exit__(None, None, None)
        has_function_mode = _get_current_function_mode() is self._calls
        if has_function_mode:
            self._calls.__exit__(None, None, None)
        if hooks:
            for hook in self._module_hooks:
                hook.remove()
        self._suspended = has_function_mode, hooks
        return True

    def resume(self) -> None:
        if self._suspended is None:
            return
        has_function_mode, hooks = self._suspended
        self._suspended = None
        self.schedule.on_resume()
        if hooks:
            self._hook_modules()
        if has_function_mode:
            self._calls.__enter__()
        self._tape.__enter__()

    def register_model(self, root: torch.nn.Module) -> None:
        """Records the names of a model's modules, and sets the origins of its parameters and
        buffers.
        """
        self.names.register(root)
        parameter = next(root.parameters(), None)
        if parameter is not None:
            self.device = parameter.device.type
        for kind, name, tensor in self.names.tensors():
            if tensor.dtype in FLOATS:
                recorded = self.provenance.get_recorded(tensor)
                if recorded is None or recorded.kind not in ("parameter", "buffer"):
                    self.provenance.set(tensor, Origin(tensor.dtype, kind, name))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.resume()  # an exception may have ended a suspended forward
        self.suspend(hooks=False)  # the computations of the watchers are not traced
        self._notify("on_step_start", optimizer)
        if not self.schedule.should_skip_step(optimizer, args, kwargs):
            self.resume()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.suspend(hooks=False)
        self._notify("on_step_end", optimizer)
        self.resume()

    @mark_observing
    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self.names.modules:
            self.register_model(module)
        if not self.stack:
            self.resume()
            self.forward_count += 1
            if next(module.parameters(), None) is not None:
                self.last_root = weakref.ref(module)
            if self.schedule.start_forward(module, args):
                return
            self._notify("on_forward_start")
            self._model_dtype_counts = None
        self.stack.append(ModuleCall(self.names.module_path(module), module))
        self._notify("on_module_enter", module, args)

    @mark_observing
    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.modules.pop(module)
        self._notify("on_module_exit", module, args, output)

    # ---- the modes
    def _run_call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a torch function that the program called. The name of the function is used to
        describe casts and calls that create tensors. If the function raises an error, the error is
        explained.
        """
        name = func.__name__
        outer_call = self.current_call
        self.current_call = func
        self.is_caller_autocast_on = torch.is_autocast_enabled(self.device)
        is_suspended = (
            name in ("backward", "grad")
            and self.schedule.should_skip_backward()
            and self.suspend(hooks=True)
        )
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.failures.explain_call_error(error, func, args, kwargs)
            raise
        finally:
            if is_suspended:
                self.resume()
            self.current_call = outer_call

    def _attach_hooks(self, op: Operator) -> None:
        op.on_call, op.on_return = self._op_hooks.get(op.name, (None, None))

    def _run_op(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        self.op_count += 1
        if op.is_factory:
            self.factory_dtype = kwargs.get("dtype")
        hook_result = op.on_call(op, args, kwargs) if op.on_call is not None else None
        try:
            out = op.func(*args, **kwargs) if kwargs else op.func(*args)
        except Exception as error:
            self.failures.explain_op_error(error, op, args, kwargs)
            raise
        if hook_result is not None:
            op.on_return(hook_result)
        if op.is_product or self.autocast.stale:
            self._report_inputs(op, args)
        if self.stack and torch._C._current_autograd_node() is None:
            # an op in forward, whose autograd node already has its sequence number
            number = torch._C._autograd._get_sequence_nr() - 1
            if number not in self.forward_sites:
                self.forward_sites[number] = (self.stack[-1].module, innermost_site())
                if len(self.forward_sites) > _MAX_SITES:
                    del self.forward_sites[next(iter(self.forward_sites))]
        if type(out) is torch.Tensor:
            if out.dtype in FLOATS:
                self.provenance.record(op, floating_operands(args), out)
        elif type(out) in (tuple, list):
            inputs = None
            for item in out:
                if type(item) is torch.Tensor and item.dtype in FLOATS:
                    inputs = floating_operands(args) if inputs is None else inputs
                    self.provenance.record(op, inputs, item)
        return out

    def _report_inputs(self, op: Operator, args: tuple) -> None:
        """Reports the inputs of a matrix product to `Promotions`. Reports the inputs of every op to
        `Autocast` while autocast's cache contains copies of weights with old values.
        """
        if torch._C._current_autograd_node() is not None:
            return
        inputs = floating_operands(args)
        if op.is_product:
            product = op.name
            if self.stack:
                product = f"{op.name} in {self.names.module_path(self.stack[-1].module)}"
            for tensor in inputs:
                self.promotions.record_spread(tensor, product)
        if self.autocast.stale and not op.is_view:
            self.autocast.on_use(inputs)

    def findings(self) -> list[Finding]:
        """Returns the faults that the watchers have found."""
        return [finding for watcher in self._watchers.values() for finding in watcher.findings()]

    # ---- events
    def _notify(self, event: str, *arguments: Any) -> None:
        for callback in self._events[event]:
            callback(*arguments)

    def on_promotion(
        self,
        op: Operator,
        origin: Origin,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._notify("on_promotion", op, origin, wide, narrow, out)

    def on_cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        self._notify("on_cast", origin, source, out)
