"""The tracer: a reader of the tape (what every op really got), of the calls above it, and of module hooks (where it was).

The modes only observe: each op runs once, unchanged, and its result is returned unchanged. While the program repeats itself they are
switched off (`pace`). The tracer calls the watchers (`watcher`), which share its state as their `Context`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...finding import Finding
from ...observe.operators import FLOATS, Operator, floating_operands
from ...observe.origin import here
from ...observe.tape import Calls, Running, Tape, observing
from .context import EVENTS, Context, Watcher
from .failures import Failures
from .origin import Origin, Provenance
from .pace import Pace
from .parameters import Cuts, Parameters, Widened
from .process import Autocast, Compiled, DefaultDtype
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
    Cuts,
    Widened,
    LogProbs,
    Compiled,
)

_KEPT_SITES = 20_000  # autograd nodes whose forward place is remembered; a step makes a few thousand


class Tracer(Context):
    """Gives every floating tensor an origin while it is entered, and tells the watchers what happened."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.provenance, self.failures, self.pace = Provenance(self), Failures(self), Pace(self)
        self._watchers = {kind: kind(self) for kind in _WATCHERS}
        self.autocast, self.defaults, self.parameters = (self._watchers[kind] for kind in (Autocast, DefaultDtype, Parameters))
        self.sums, self.promotions = self._watchers[Sums], self._watchers[Promotions]
        # for each event, the methods of the watchers that declare it
        self._events = {event: [getattr(w, event) for w in self._watchers.values() if event in vars(type(w))] for event in EVENTS}
        self._of_ops = {name: given for watcher in self._watchers.values() for name, given in watcher.ops().items()}
        self.ops = 0  # watched
        self._hooks: list[Any] = []
        self._module_hooks: list[Any] = []
        self._tape, self._calls = Tape(self._ran, learned=self._learned), Calls(self._called)
        self._suspended: tuple[bool, bool] | None = None  # whether the function mode and the hooks are off too, while the dispatch mode is
        if model is not None:
            self.learn(model)

    # ---- lifetime
    def __enter__(self) -> Tracer:
        self._hook_modules()
        self._hooks = [register_optimizer_step_pre_hook(self._stepping), register_optimizer_step_post_hook(self._stepped)]
        self.provenance.start()
        for watcher in self._watchers.values():
            watcher.start()
        self._calls.__enter__()
        self._tape.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.resume()
        self.pace.stop()
        self._tape.__exit__(kind, error, traceback)
        self._calls.__exit__(kind, error, traceback)
        for watcher in reversed(self._watchers.values()):
            watcher.stop()
        self.provenance.stop()
        for hook in (*self._hooks, *self._module_hooks):
            hook.remove()

    def _hook_modules(self) -> None:
        modules = torch.nn.modules.module
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def suspend(self, *, hooks: bool) -> bool:
        if self._suspended is not None or _get_current_dispatch_mode() is not self._tape:
            return False
        self._tape.__exit__(None, None, None)
        calls = _get_current_function_mode() is self._calls
        if calls:
            self._calls.__exit__(None, None, None)
        if hooks:
            for hook in self._module_hooks:
                hook.remove()
        self._suspended = calls, hooks
        return True

    def resume(self) -> None:
        if self._suspended is None:
            return
        calls, hooks = self._suspended
        self._suspended = None
        self.pace.resumed()
        if hooks:
            self._hook_modules()
        if calls:
            self._calls.__enter__()
        self._tape.__enter__()

    def learn(self, root: torch.nn.Module) -> None:
        """Names a model, and gives its parameters and buffers their origins."""
        self.names.learn(root)
        first = next(root.parameters(), None)
        if first is not None:
            self.device = first.device.type
        for kind, name, tensor in self.names.tensors():
            if tensor.dtype in FLOATS:
                known = self.provenance.known(tensor)
                if known is None or known.kind not in ("parameter", "buffer"):
                    self.provenance.set(tensor, Origin(tensor.dtype, kind, name))

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.resume()  # an exception may have ended a suspended part
        self.suspend(hooks=False)  # what the watchers compute is no part of the program
        self._tell("stepping", optimizer)
        if not self.pace.step_unwatched(optimizer, args, kwargs):
            self.resume()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.suspend(hooks=False)
        self._tell("stepped", optimizer)
        self.resume()

    @observing
    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if module not in self.names.modules:
            self.learn(module)
        if not self.stack:
            self.resume()
            self.forwards += 1
            if next(module.parameters(), None) is not None:
                self.last_root = weakref.ref(module)
            if self.pace.begins(module, args):
                return
            self._tell("forward_begins")
            self._census = None
        self.stack.append(Running(self.names.of(module), module))
        self._tell("entered", module, args)

    @observing
    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.modules.leave(module)
        self._tell("left", module, args, output)

    # ---- the modes
    def _called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What the program called, above the dispatcher: names casts and factories, and sees the checks that are made there."""
        name = func.__name__
        outer, self.calling = self.calling, func
        self.autocast_around = torch.is_autocast_enabled(self.device)
        suspended = name in ("backward", "grad") and self.pace.backward_unwatched() and self.suspend(hooks=True)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.failures.call_failed(error, func, args, kwargs)
            raise
        finally:
            if suspended:
                self.resume()
            self.calling = outer

    def _learned(self, op: Operator) -> None:
        op.before, op.after = self._of_ops.get(op.name, (None, None))

    def _ran(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        self.ops += 1
        if op.factory:
            self.factory_dtype = kwargs.get("dtype")
        token = op.before(op, args, kwargs) if op.before is not None else None
        try:
            out = op.func(*args, **kwargs) if kwargs else op.func(*args)
        except Exception as error:
            self.failures.op_failed(error, op, args, kwargs)
            raise
        if token is not None:
            op.after(token)
        if op.product or self.autocast.stale:
            self._feeds(op, args)
        if self.stack and torch._C._current_autograd_node() is None:
            # an op in forward: the autograd node that it gets has its number already
            number = torch._C._autograd._get_sequence_nr() - 1
            if number not in self.forward_sites:
                self.forward_sites[number] = (self.stack[-1].module, here())
                if len(self.forward_sites) > _KEPT_SITES:
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

    def _feeds(self, op: Operator, args: tuple) -> None:
        """What goes into a product matters to promotions; while copies are stale, what goes into anything matters."""
        if torch._C._current_autograd_node() is not None:
            return
        inputs = floating_operands(args)
        if op.product:
            for tensor in inputs:
                self.promotions.reached(tensor, f"{op.name} in {self.names.of(self.stack[-1].module)}" if self.stack else op.name)
        if self.autocast.stale and not op.view:
            self.autocast.consumed(inputs)

    def findings(self) -> list[Finding]:
        """What failed silently, as far as seen until now."""
        return [finding for watcher in self._watchers.values() for finding in watcher.findings()]

    # ---- events
    def _tell(self, event: str, *what: Any) -> None:
        for told in self._events[event]:
            told(*what)

    def promoted(self, op: Operator, origin: Origin, wide: torch.Tensor, narrow: torch.Tensor, out: torch.Tensor) -> None:
        self._tell("promoted", op, origin, wide, narrow, out)

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        self._tell("cast", origin, source, out)
