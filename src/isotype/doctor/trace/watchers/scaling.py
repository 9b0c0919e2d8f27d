"""The loss scale of fp16: gradients clipped while they still hold it, and a scaler that skips step after step.

Clipped like that, the norm compared with the limit is tens of thousands of times too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....finding import Finding, Severity
from ..source import Site, place_of

if TYPE_CHECKING:
    from ..tracer import Tracer

_START = 10  # skipped steps from which on a run that has taken none counts as stuck: from 65536 down to 64
_ROW = 16  # skipped steps in a row, later on
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class Scaling:
    """Follows GradScaler from `scale(loss)` to `unscale_(optimizer)`, and looks at what is clipped between the two."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._scale = 1.0  # that the gradients hold; 1 where none do
        self._unscaled: set[int] = set()  # parameters whose gradients hold it no more
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
        self._around(scaler, "scale", self._scaled)
        self._around(scaler, "unscale_", self._unscale)
        self._around(scaler, "step", self._done)
        self._around(scaler, "update", self._updates)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in _CLIPPING:
                self._around(module, name, self._clipped, rests=True)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._around(owner, "zero_grad", self._zeroed, rests=True)

    def stop(self) -> None:
        for owner, name, function in reversed(self._undo):
            setattr(owner, name, function)
        self._undo.clear()

    def _around(self, owner: Any, name: str, told: Callable[..., None], *, rests: bool = False) -> None:
        function, tracer = getattr(owner, name), self._tracer

        def watched(*args: Any, **kwargs: Any) -> Any:
            told(name, *args, **kwargs)
            if not (rests and tracer.pace.call_rests(name) and tracer.rest(hooks=False)):
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                tracer.wake()

        watched.__name__, watched.__doc__ = name, function.__doc__
        self._undo.append((owner, name, function))
        setattr(owner, name, watched)

    def _scaled(self, _: str, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self._scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        self._unscaled.clear()

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
        self._stepped_at = self._stepped_at or self._tracer.locator.here(3)

    def _zeroed(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any, **kwargs: Any) -> None:
        self._scale = 1.0

    def _clipped(self, name: str, parameters: Any, *args: Any, **kwargs: Any) -> None:
        # a generator is the callee's to read
        known = [parameters] if isinstance(parameters, torch.Tensor) else parameters if isinstance(parameters, (list, tuple)) else None
        if self._scale == 1.0 or (self._unscaled if known is None else any(id(p) in self._unscaled for p in known)):
            return
        self._count += 1
        self._first = self._first or (name, self._scale, self._tracer.locator.here(3))

    def findings(self) -> list[Finding]:
        return [*self._clip_finding(), *self._skip_finding()]

    def _skip_finding(self) -> list[Finding]:
        if self._worst < (_ROW if self._taken else _START):
            return []
        site = self._stepped_at
        return [
            Finding(
                code="TR029",
                severity=Severity.WARNING,
                message=f"GradScaler skipped {self._worst} steps in a row" + ("" if self._taken else " and took none"),
                place=place_of(site),
                cause="the gradients of every one of these steps held inf or NaN, so the weights stand still while the loss is logged: "
                "a few skipped steps find the scale, so many mean that fp16 overflows at any scale (a loss or an activation beyond "
                "65504, a NaN in the data or a weight), or that the scale falls too slowly (backoff_factor near 1)",
                fix="run in bf16, which has the range of fp32 and needs no scaler; or keep what overflows in fp32 (the loss and its sum "
                "first), and leave backoff_factor at 0.5",
                details=(("updated at", f"{site}: {site.text}"),) if site is not None else (),
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
                cause=f"GradScaler.scale multiplied the loss, and with it every gradient, by {scale:g}: compared like that with the limit, "
                "nearly every step is clipped, and what is left after unscaling is that much too small",
                observed=f"{self._count} times" if self._count > 1 else "",
                fix=f"call scaler.unscale_(optimizer) between backward and {name} (scaler.step then does not unscale again)",
                details=(("clipped at", f"{site}: {site.text}"),) if site is not None else (),
            )
        ]
