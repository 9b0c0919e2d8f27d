"""`Watcher`: the events of a trace. A watcher declares the events that it wants by overriding their methods; it is called for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...finding import Finding
from .context import Context
from .ops import Op
from .origin import Origin

Before = Callable[[Op, tuple, dict | None], Any]
After = Callable[[Any], None]


class Watcher:
    """One way in which a program goes wrong without an error.

    order  its findings come after those of watchers with a smaller one, and so do its calls for an event
    """

    order = 50

    def __init__(self, context: Context) -> None:
        self._context = context

    def start(self) -> None:
        """The trace begins."""

    def stop(self) -> None:
        """The trace ends."""

    def root_called(self, module: torch.nn.Module) -> None:
        """The model is about to run, also where the trace will not watch this forward."""

    def forward_begins(self) -> None:
        """A watched forward of the model is about to run."""

    def entered(self, module: torch.nn.Module, args: tuple) -> None:
        """A module's forward begins; the module is the last of `context.stack`."""

    def left(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        """A module's forward has ended; `context.stack` holds the modules around it."""

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        """By name of an op: what is called with (op, args, kwargs) before it runs, and with what that returned (not None) after it."""
        return {}

    def promoted(self, op: Op, origin: Origin, wide: torch.Tensor, narrow: torch.Tensor, out: torch.Tensor) -> None:
        """An op widened one of its operands to the dtype of another."""

    def cast(self, origin: Origin, source: torch.Tensor, out: torch.Tensor) -> None:
        """A tensor was cast: by the program, by autocast, or by autograd (`origin.kind`)."""

    def data_set(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """The program is about to run `tensor.data = value`."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def findings(self) -> list[Finding]:
        """What was found so far."""
        return []


EVENTS = ("root_called", "forward_begins", "entered", "left", "promoted", "cast", "data_set", "stepping", "stepped")


class Subscriptions:
    """For each event, the methods of the watchers that declare it."""

    def __init__(self, watchers: list[Watcher]) -> None:
        def wanted(event: str) -> list[Any]:
            return [getattr(watcher, event) for watcher in watchers if getattr(type(watcher), event) is not getattr(Watcher, event)]

        self.root_called, self.forward_begins, self.entered, self.left, *others = map(wanted, EVENTS)
        self.promoted, self.cast, self.data_set, self.stepping, self.stepped = others
        self._ops: dict[str, list[tuple[Before, After | None]]] = {}
        for watcher in watchers:
            for name, given in watcher.before_ops().items():
                self._ops.setdefault(name, []).append(given if isinstance(given, tuple) else (given, None))

    def of_op(self, name: str) -> tuple[Before | None, After | None]:
        """What is called before an op of this name, and after it; None for most ops."""
        wanted = self._ops.get(name, [])
        if len(wanted) < 2:
            return wanted[0] if wanted else (None, None)

        def before(op: Op, args: tuple, kwargs: dict | None) -> list[tuple[After, Any]] | None:
            told = [(after, one(op, args, kwargs)) for one, after in wanted]
            return [(after, token) for after, token in told if after is not None and token is not None] or None

        def after_all(told: list[tuple[After, Any]]) -> None:
            for after, token in told:
                after(token)

        return before, after_all
