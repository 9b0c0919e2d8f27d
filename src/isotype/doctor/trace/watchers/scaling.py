"""The loss scale of fp16: gradients clipped or stepped while they still hold it, or rid of it twice; a scaler that skips step after step.

Clipped like that, the norm compared with the limit is tens of thousands of times too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....finding import Finding, Severity
from ....observe.operators import Operator
from ....observe.origin import Site, here, place_of
from ..context import After, Before, Context, Watcher, now_and_then

_START = 10  # skipped steps from which on a run that has taken none counts as stuck: from 65536 down to 64
_ROW = 16  # skipped steps in a row, later on
_LOOKS = 8  # scaled losses whose gradients are followed, then those whose number is a power of two
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class Scaling(Watcher):
    """Follows GradScaler from `scale(loss)` to `unscale_(optimizer)`, and looks at what is clipped between the two."""

    order = 80

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._scale = 1.0  # that the gradients hold; 1 where none do
        self._unscaled: set[int] = set()  # parameters whose gradients hold it no more
        self._before: dict[int, tuple[int, int]] = {}  # id of a parameter -> its gradient as it was when the loss was scaled
        self._held: dict[int, tuple[int, int]] = {}  # the same after that loss's backward, of gradients that it wrote
        self._memory: set[int] = set()  # of those gradients
        self._by_hand: dict[int, Site | None] = {}  # gradients' memory that the program itself divided by the scale
        self._rids_itself = False  # whether the program was seen dividing by the scale
        self._made_at: Site | None = None  # where the last scaler was made
        self._stepped: tuple[float, Site | None] | None = None
        self._twice: tuple[float, Site | None, Site | None] | None = None
        self._within = False  # the scaler's own step
        self._scalers: set[Any] = set()  # those that skipped; references keep their ids from being reused
        self._losses = 0
        self._awaited = False  # whether a scaled loss has not had its backward
        self._first: tuple[str, float, Site | None] | None = None
        self._count = 0
        self._skipped = 0  # steps in a row
        self._worst = 0
        self._taken = False
        self._stepped_at: Site | None = None
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def scaled(self) -> bool:
        """Whether gradients hold a loss scale now."""
        return self._scale != 1.0

    def start(self) -> None:
        scaler = torch.amp.GradScaler
        self._around(scaler, "__init__", self._made)
        self._around(scaler, "scale", self._scaled)
        self._around(scaler, "unscale_", self._unscale)
        self._around(scaler, "step", self._done)
        self._around(scaler, "update", self._updates)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPPING:
                self._around(module, name, self._clipped, suspended=True)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._around(owner, "zero_grad", self._zeroed, suspended=True)

    def stop(self) -> None:
        for owner, name, function in reversed(self._undo):
            setattr(owner, name, function)
        self._undo.clear()

    def _around(self, owner: Any, name: str, told: Callable[..., None], *, suspended: bool = False) -> None:
        function, context = getattr(owner, name), self._context

        def watched(*args: Any, **kwargs: Any) -> Any:
            told(name, *args, **kwargs)
            if not (suspended and context.pace.call_unwatched(name) and context.suspend(hooks=False)):
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                context.resume()

        watched.__name__, watched.__doc__ = name, function.__doc__
        self._undo.append((owner, name, function))
        setattr(owner, name, watched)

    def _made(self, *args: Any, **kwargs: Any) -> None:
        self._made_at = here()

    def _scaled(self, _: str, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self._scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        self._unscaled.clear()
        self._held.clear()
        self._memory.clear()
        self._by_hand.clear()
        self._within = False
        self._losses += 1
        self._before = self._gradients() if self.scaled and now_and_then(self._losses, _LOOKS) else {}
        self._awaited = self.scaled and now_and_then(self._losses, _LOOKS)

    def _gradients(self) -> dict[int, tuple[int, int]]:
        """Memory and version of every parameter's gradient."""
        return {
            id(p): (p.grad.untyped_storage()._cdata, p.grad._version)
            for root in self._context.names.roots()
            for p in root.parameters()
            if p.grad is not None and p.grad.layout == torch.strided
        }

    def backward_done(self) -> None:
        """After a backward: the gradients that it wrote hold the scale of its loss."""
        if not self._awaited:
            return
        self._awaited = False
        self._held = {key: state for key, state in self._gradients().items() if self._before.get(key) != state}
        self._memory = {memory for memory, _ in self._held.values()}

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"mul": self._by_a_number, "div": self._by_a_number}

    def _by_a_number(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Between forwards, a gradient may be multiplied or divided by the scale."""
        if self.scaled and self._context.between_passes() and isinstance(args[0], torch.Tensor):
            self.multiplied(args[0], args[1], 1.0 if op.name == "mul" else -1.0)

    def multiplied(self, tensor: torch.Tensor, factor: Any, power: float) -> None:
        """A tensor is multiplied by a number while gradients are scaled: a gradient that is rid of the scale by hand."""
        if not self._memory:
            return
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                return
            factor = float(factor)
        if type(factor) not in (int, float) or not factor:
            return
        memory = tensor.untyped_storage()._cdata
        if memory in self._memory and abs(float(factor) ** power * self._scale - 1.0) < 1e-3:
            self._by_hand.setdefault(memory, here())
            self._rids_itself = True

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """Before an optimizer's step: whether it is not the scaler's, and its gradients hold the scale."""
        if self._within or not self.scaled or not self._held:
            return
        now = {
            id(p): (p.grad.untyped_storage()._cdata, p.grad._version)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.grad.layout == torch.strided
        }
        holding = [key for key, state in now.items() if self._held.get(key) == state and key not in self._unscaled]
        if holding and 2 * len(holding) > len(now):
            self._stepped = self._stepped or (self._scale, here())

    def _unscale(self, _: str, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._unscaled |= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _updates(self, _: str, scaler: Any, new_scale: Any = None) -> None:
        """Before `scaler.update()`: whether the step was skipped."""
        states = scaler._per_optimizer_states.values() if scaler.is_enabled() and new_scale is None else ()
        found = [value for state in states for value in state["found_inf_per_device"].values()]
        if not found:
            return
        skipped = any(float(value) for value in found)
        self._skipped = self._skipped + 1 if skipped else 0
        self._taken = self._taken or not skipped
        self._worst = max(self._worst, self._skipped)
        self._stepped_at = self._stepped_at or here()
        if skipped and len(self._scalers) < _ROW:
            self._scalers.add(scaler)

    def _zeroed(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, _: str, scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Before `scaler.step(optimizer)`, which takes the scale off unless `unscale_` did."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        twice = [p for p in parameters if id(p) in self._held and id(p) not in self._unscaled and self._off_by_hand(p)]
        if twice and 2 * len(twice) > len(parameters):
            memory = self._held[id(twice[0])][0]
            self._twice = self._twice or (self._scale, self._by_hand[memory], here())
        self._scale = 1.0
        self._within = True

    def _off_by_hand(self, parameter: torch.Tensor) -> bool:
        held = self._held.get(id(parameter))
        return held is not None and held[0] in self._by_hand

    def _clipped(self, name: str, parameters: Any, *args: Any, **kwargs: Any) -> None:
        # a generator is the callee's to read
        known = [parameters] if isinstance(parameters, torch.Tensor) else parameters if isinstance(parameters, (list, tuple)) else None
        if self._rids_itself:
            return
        if self._scale == 1.0 or (self._unscaled if known is None else any(id(p) in self._unscaled for p in known)):
            return
        self._count += 1
        self._first = self._first or (name, self._scale, here())

    def findings(self) -> list[Finding]:
        return [*self._clip_finding(), *self._step_findings(), *self._skip_finding()]

    def _step_findings(self) -> list[Finding]:
        found = []
        if self._stepped is not None:
            scale, site = self._stepped
            found.append(
                _misused(
                    f"an optimizer steps gradients that hold the loss scale of {scale:g}",
                    site,
                    f"GradScaler.scale multiplied the loss, and with it every gradient, by {scale:g}, and the optimizer was called without "
                    "the scaler: SGD moves the weights that much too far; Adam hides it, with an eps that is as much too small, and "
                    "inf or NaN gradients are stepped too",
                    "scaler.step(optimizer) and scaler.update() in place of optimizer.step(); or no scaler, which bf16 does not need",
                )
            )
        if self._twice is not None:
            scale, by_hand, site = self._twice
            found.append(
                _misused(
                    f"gradients are divided by the loss scale of {scale:g} twice",
                    by_hand or site,
                    f"the program divided the gradients by the scale, and scaler.step ({site}) divides them by {scale:g} again, since only "
                    "scaler.unscale_ tells it that this was done: the weights hardly move",
                    "scaler.unscale_(optimizer) in place of the division: scaler.step then leaves the gradients as they are",
                )
            )
        return found

    @property
    def stuck(self) -> bool:
        """Whether a scaler skipped step after step."""
        return self._worst >= (_ROW if self._taken else _START)

    def _skip_finding(self) -> list[Finding]:
        if not self.stuck:
            return []
        site = self._stepped_at
        beyond = self._context.overflows.beyond
        if not self._taken and len(self._scalers) >= _START:
            return [_made_anew(self._worst, self._made_at or site)]
        return [
            Finding(
                code="TR029",
                severity=Severity.WARNING,
                message=f"GradScaler skipped {self._worst} steps in a row" + ("" if self._taken else " and took none"),
                place=place_of(site),
                cause="the gradients of every one of these steps held inf or NaN, so the weights do not change while the loss is logged: "
                "a few skipped steps find the scale, so many mean that fp16 overflows at any scale (a loss or an activation beyond "
                "65504, a NaN in the data or a weight), or that the scale falls too slowly (backoff_factor near 1)",
                fix="run in bf16, which has the range of fp32 and needs no scaler; or keep what overflows in fp32 (the loss and its sum "
                "first), and leave backoff_factor at 0.5",
                details=(
                    *((("updated at", f"{site}: {site.text}"),) if site is not None else ()),
                    *((("overflows at", f"{beyond}: {beyond.text}"),) if beyond is not None else ()),
                ),
            )
        ]

    def _clip_finding(self) -> list[Finding]:
        if self._first is None:
            return []
        name, scale, site = self._first
        return [
            Finding(
                code="TR027",
                severity=Severity.WARNING,
                message=f"{name} clips gradients that still hold the loss scale of {scale:g}",
                place=place_of(site),
                cause=f"GradScaler.scale multiplied the loss, and with it every gradient, by {scale:g}: compared with the limit "
                "before they are unscaled, "
                "nearly every step is clipped, and what is left after unscaling is that much too small",
                observed=f"{self._count} times" if self._count > 1 else "",
                fix=f"call scaler.unscale_(optimizer) between backward and {name} (scaler.step then does not unscale again)",
                details=(("clipped at", f"{site}: {site.text}"),) if site is not None else (),
            )
        ]


def _misused(message: str, site: Site | None, cause: str, fix: str) -> Finding:
    return Finding(
        code="TR027",
        severity=Severity.WARNING,
        message=message,
        place=place_of(site),
        cause=cause,
        fix=fix,
        details=(("at", f"{site}: {site.text}"),) if site is not None else (),
    )


def _made_anew(steps: int, site: Site | None) -> Finding:
    return Finding(
        code="TR029",
        severity=Severity.WARNING,
        message=f"GradScaler skipped {steps} steps in a row and took none: each step had its own scaler",
        place=place_of(site),
        cause="a GradScaler finds its scale by halving it after every skipped step; one that is created for each step starts at its "
        "initial scale again, overflows again, and every step is skipped",
        fix="make one GradScaler before the loop, and save and load its state_dict with the optimizer's",
        details=(("made at", f"{site}: {site.text}"),) if site is not None else (),
    )
