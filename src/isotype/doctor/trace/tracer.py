"""The tracer: a reader of the tape (what every op really got), of the calls above it, and of module hooks (where it was).

The modes only observe: each op runs once, unchanged, and its result is returned unchanged. While the program repeats itself they are
switched off (`pace`). The tracer calls the watchers (`watcher`), which share its state as their `Context`.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...finding import Finding
from ...observe.operators import FLOATS, Operator, floating_operands
from ...observe.origin import OBSERVERS, Site, here, statement
from ...observe.tape import Calls, Modules, Running, Tape, observing
from .context import UNWATCHED, Names, Subscriptions, Watcher
from .failures import Failures
from .origin import MARK, Origin, Provenance
from .pace import Pace
from .parameters import Cuts, Parameters, Widened
from .process import Autocast, Compiled, DefaultDtype
from .promotions import EngineCasts, Promotions
from .ranges import LogProbs, Overflows, Positions
from .updates import Sums, Updates

_CASTING = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as", "copy", "tensor", "as_tensor", "cpu", "cuda"})

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

W = TypeVar("W", bound=Watcher)
_KEPT_SITES = 20_000  # autograd nodes whose forward place is remembered; a step makes a few thousand


class Tracer:
    """Gives every floating tensor an origin while it is entered, and tells the `watchers` what happened."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self.names = Names()
        self.modules = Modules()
        self.calling: Any = None
        self.provenance = Provenance(self)
        self.failures = Failures(self)
        self._watchers = {kind: kind(self) for kind in _WATCHERS}
        self._events = Subscriptions(list(self._watchers.values()))
        # those that other watchers ask, and those that get more than the events
        self.autocast, self.defaults, self.parameters = self._one(Autocast), self._one(DefaultDtype), self._one(Parameters)
        self.updates, self.sums, self.promotions = self._one(Updates), self._one(Sums), self._one(Promotions)
        self.pace = Pace(self)
        self._census: Counter[torch.dtype] | None = None
        self._last_root: weakref.ref[torch.nn.Module] | None = None  # with parameters, called last from outside any other
        self.device = "cpu"
        self.factory_dtype: torch.dtype | None = None  # what the running factory call names
        self.autocast_around = False  # whether autocast was on where the program called; it reads as off below the dispatcher
        self.ops = 0  # watched
        self.forwards = 0  # calls of root modules
        self._model = model
        self._forward_sites: dict[int, tuple[torch.nn.Module | None, Site | None]] = {}
        self._hooks: list[Any] = []
        self._module_hooks: list[Any] = []
        self._tape, self._calls = Tape(self._ran, learned=self._learned), Calls(self._called)
        self._suspended: tuple[bool, bool] | None = None  # whether the function mode and the hooks are off too, while the dispatch mode is
        if model is not None:
            self.learn(model)

    @property
    def stack(self) -> list[Running]:
        return self.modules.stack

    def _one(self, kind: type[W]) -> W:
        found = self._watchers[kind]
        assert isinstance(found, kind)
        return found

    # ---- lifetime
    def __enter__(self) -> Tracer:
        self._hook_modules()
        self._hooks.append(register_optimizer_step_pre_hook(self._stepping))
        self._hooks.append(register_optimizer_step_post_hook(self._stepped))
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
        self._hooks.clear()
        self._module_hooks.clear()

    def _hook_modules(self) -> None:
        modules = torch.nn.modules.module
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
        ]

    def suspend(self, *, hooks: bool) -> bool:
        """Takes the modes off until `resume`, and the hooks of modules with them; not when the program put a mode of its own above ours."""
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
                    self.provenance.set(tensor, Origin(tensor.dtype, kind, name, via=None))

    def _stepping(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.resume()  # an exception may have ended a suspended part
        self.suspend(hooks=False)  # what the watchers compute is no part of the program
        for stepping in self._events.stepping:
            stepping(optimizer)
        if not self.pace.step_unwatched(optimizer, args, kwargs):
            self.resume()

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.suspend(hooks=False)
        for stepped in self._events.stepped:
            stepped(optimizer)
        self.resume()

    @observing
    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        key = id(module)
        if key not in self.names.modules:
            self.learn(module)
        if not self.stack:
            self.resume()
            self.forwards += 1
            if next(module.parameters(), None) is not None:
                self._last_root = weakref.ref(module)
            for root_called in self._events.root_called:
                root_called(module)
            if self.pace.begins(module, args):
                return
            for forward_begins in self._events.forward_begins:
                forward_begins()
            self._census = None
        self.stack.append(Running(self.names.of(module), module))
        for entered in self._events.entered:
            entered(module, args)

    @observing
    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.modules.leave(module)
        for left in self._events.left:
            left(module, args, output)

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
        op.before, op.after = self._events.of_op(op.name)

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
            if number not in self._forward_sites:
                self._forward_sites[number] = (self.stack[-1].module, here())
                if len(self._forward_sites) > _KEPT_SITES:
                    for old in list(self._forward_sites)[: _KEPT_SITES // 2]:
                        del self._forward_sites[old]
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

    # ---- what the others ask
    def here(self) -> tuple[Site | None, str, str]:
        """Line, module path and (in backward) autograd node of the running op; a backward op stands where its forward stood."""
        node = torch._C._current_autograd_node()
        site = here()
        if node is not None:
            module, forward = self._forward_sites.get(node._sequence_nr(), (None, None))
            return forward or site, self.names.of(module) if module is not None else "", node.name()
        return site, self.names.of(self.stack[-1].module) if self.stack else "", ""

    def between_passes(self) -> bool:
        """Whether neither a forward of the model nor a backward runs now."""
        return not self.stack and torch._C._current_autograd_node() is None

    def calling_name(self) -> str:
        return getattr(self.calling, "__name__", "").strip("_") if self.calling is not None else ""

    def default_dtype_decides(self, site: Site | None, dtype: torch.dtype, op: Operator) -> bool:
        """Whether a factory call took the default dtype because it names none."""
        if dtype != torch.get_default_dtype() or self.factory_dtype is not None:
            return False
        if op.lift and (site is None or "dtype" in statement(site) or self.calling_name() not in ("tensor", "Tensor")):
            return False
        self.defaults.decided(site)
        return True

    def cast_by_engine(self) -> bool:
        """Whether autograd itself cast what a custom Function's backward returned: no Python frame of that backward is left."""
        node = torch._C._current_autograd_node()
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(OBSERVERS):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_name == "_engine_run_backward"

    def cast_by_autocast(self) -> bool:
        """Whether autocast put the running cast in: it is on, and what the program called is no cast."""
        return self.autocast_around and self.calling_name() not in _CASTING

    def unrecorded(self, tensor: torch.Tensor) -> Origin:
        """An origin for a tensor that no traced op made: a parameter under a new dtype or not yet named, or something from outside."""
        mark = tensor.__dict__.get(MARK)
        if mark is not None and mark[0].kind in ("parameter", "buffer"):
            origin = Origin(tensor.dtype, mark[0].kind, mark[0].what)
            tensor.__dict__[MARK] = (origin, None)
            return origin
        if isinstance(tensor, torch.nn.Parameter):
            return Origin(
                tensor.dtype, "parameter", self.names.parameter_name(tensor) or f"of shape {tuple(tensor.shape)}, in no module seen so far"
            )
        where = f"{UNWATCHED}, " if self.pace.unwatched else ""
        return Origin(tensor.dtype, "input", f"{where}shape {tuple(tensor.shape)}")

    def findings(self) -> list[Finding]:
        """What failed silently, as far as seen until now."""
        return [finding for watcher in self._watchers.values() for finding in watcher.findings()]

    # ---- events
    def promoted(self, op: Operator, origin: Origin, wide: torch.Tensor, narrow: torch.Tensor, out: torch.Tensor) -> None:
        for promoted in self._events.promoted:
            promoted(op, origin, wide, narrow, out)

    def cast(self, op: Operator, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        for cast in self._events.cast:
            cast(origin, source, out)

    def dtypes_changed(self) -> None:
        self._census = None
        self.pace.changed()

    def census(self) -> Counter[torch.dtype]:
        """Parameter elements by dtype of the model that is running."""
        if self._census is None:
            self._census = self.names.census(self.stack[0].module if self.stack else None)
        return self._census

    def census_of_failure(self) -> Counter[torch.dtype]:
        """The same of the whole model that is running, or that ran last (in a loss, or between two forwards); of all before any has run."""
        running = self.stack[0].module if self.stack else None
        if running is None or next(running.parameters(), None) is None:
            running = self._last_root() if self._last_root is not None else None
        return self.names.census(self.names.root_of(running) if running is not None else None)
