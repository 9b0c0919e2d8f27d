"""Decides what is watched op by op: the first forwards of each kind, a sample of the later ones, and all code between forwards.

PyTorch's modes cost a Python call for every op, which is most of what a trace costs. A forward like eight before it has nothing
new to tell: its ops run without the modes and hooks, and so do its backward and the optimizer's step. What the program does
elsewhere (losses, metrics, averages, assignments, casts) is always watched, and so is a forward while something it sums in low
precision grows. A dtype error in an unwatched forward is explained by running that forward again, watched.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from .context import Context, now_and_then

FIRST = 8  # forwards of a kind, and steps of an optimizer, that are watched; then those whose number is a power of two,
EVERY = 64  # and every so-manieth, for what comes up late
_NEW_SIZES = 2  # forwards that are watched when only the sizes of the inputs are new
_NESTED, _LONG = 3, 16  # of containers among the inputs: how deep, and how many items are told apart


class Pace:
    """Counts forwards and steps by kind, and switches the tracer off for those that repeat."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._count: Counter[Any] = Counter()
        self._number = 0  # of the running forward among those of its kind
        self._unwatched_since_backward = False  # whether a forward since the last backward was not watched
        self.unwatched = False  # whether the last forward was not watched
        self._end: Any = None  # the hook at the end of an unwatched forward
        self._over: list[Any] = []  # such hooks of forwards that ended in an error, which torch was walking through then

    @property
    def sampled(self) -> bool:
        """Whether the running forward is one of the later ones that are watched now and then."""
        return self._number > FIRST and _sampled(self._number)

    @property
    def looking(self) -> bool:
        """Whether the values of the running forward are looked at, which costs more than dtypes."""
        return self._number <= FIRST // 2 or self.sampled

    def changed(self) -> None:
        """Parameters changed their dtype, or something failed: nothing counts as known."""
        self._count.clear()

    # ---- forwards
    def begins(self, module: torch.nn.Module, args: tuple) -> bool:
        """Called at the start of a root module's forward. Returns whether this forward is not watched."""
        while self._over:
            self._over.pop().remove()
        kwargs = sys._getframe(2).f_locals.get("kwargs", {})  # of Module.__call__; a global hook before forward is not given them
        kind, sizes = self._kind(module, args, kwargs)
        self._count[kind] += 1
        self._count[kind, sizes] += 1
        self._number = self._count[kind]
        watched = self._number <= FIRST or _sampled(self._number) or self._count[kind, sizes] <= _NEW_SIZES
        self.unwatched = False
        if watched or torch._C._current_autograd_node() is not None or self._context.sums.grows():
            return False
        if isinstance(module, torch.jit.ScriptModule) or not self._context.suspend(hooks=True):
            return False
        self._unwatched_since_backward = self.unwatched = True
        self._end = module.register_forward_hook(self._ends, with_kwargs=True, always_call=True)
        return True

    def _ends(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self._end is None:
            return
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            self._over.append(self._end)
            self._end = None
        self._context.resume()
        if isinstance(error, Exception):
            self.changed()
            self._context.failures.again(error, module, args, kwargs)

    def resumed(self) -> None:
        if self._end is not None:
            self._end.remove()
            self._end = None

    def stop(self) -> None:
        while self._over:
            self._over.pop().remove()

    def _kind(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        """What makes one forward like another, and the sizes of its inputs."""
        device, sizes = self._context.device, []

        def of(value: Any, nested: int = 0) -> Any:
            if isinstance(value, torch.Tensor):
                sizes.append(tuple((length - 1).bit_length() for length in value.shape))
                return value.dtype, value.requires_grad
            if isinstance(value, dict) and nested < _NESTED:
                return tuple((key, of(item, nested + 1)) for key, item in list(value.items())[:_LONG])
            if isinstance(value, (tuple, list)) and nested < _NESTED:
                return tuple(of(item, nested + 1) for item in value[:_LONG])
            return value if value is None or isinstance(value, (bool, str)) else type(value)

        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        state = (id(module), module.training, torch.is_grad_enabled(), autocast, torch.get_default_dtype())
        return (state, of(args), of(kwargs)), tuple(sizes)

    # ---- backwards, and steps of an optimizer
    def backward_unwatched(self) -> bool:
        """Called as a backward begins. Returns whether it is not watched: tensors of an unwatched forward have no origins."""
        unwatched, self._unwatched_since_backward = self._unwatched_since_backward, False
        return unwatched

    def step_unwatched(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
        """Called as a step begins. One with a closure runs forwards."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        kind = (id(optimizer), frozenset((p.dtype, p.grad.dtype) for p in held if p.grad is not None))
        return self.call_unwatched(kind) and not any(callable(given) for given in (*args[1:], *kwargs.values()))

    def call_unwatched(self, kind: Any) -> bool:
        """Called as something begins that repeats itself."""
        self._count[kind] += 1
        return self._count[kind] > FIRST and not _sampled(self._count[kind])


def _sampled(number: int) -> bool:
    return now_and_then(number, 0) or not number % EVERY
