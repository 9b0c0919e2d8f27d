"""The optimizer step after which a weight is inf or NaN: from a gradient that was, or made by the step itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Severity, listed
from ..context import Context
from ..pace import now_and_then
from ..source import Site, place_of
from ..watcher import Watcher

_LOOKS = 4  # steps that are looked at; then those whose number is a power of two


@dataclass(frozen=True, slots=True)
class Broken:
    names: list[str]
    dtype: torch.dtype
    gradient: str  # what the first one's gradient held: "inf", "NaN" or ""
    eps: float | None  # of the optimizer, where it rounds to zero in that dtype
    site: Site | None


class BrokenSteps(Watcher):
    """Looks at the parameters before and after a step, until one is broken by it."""

    order = 55

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._steps: dict[int, int] = {}
        self._before: dict[int, str] | None = None  # id of a parameter that is finite -> what its gradient holds
        self._first: Broken | None = None

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        count = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        self._before = None
        if self._first is None and now_and_then(count, _LOOKS):
            with torch.no_grad():
                self._before = {id(p): unfit(p.grad) for p, _ in _stepped(optimizer) if not unfit(p)}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._before:
            return
        with torch.no_grad():
            broken = [(p, group) for p, group in _stepped(optimizer) if id(p) in self._before and unfit(p)]
        if not broken:
            return
        first, group = broken[0]
        eps = group.get("eps")
        vanishes = isinstance(eps, float) and eps > 0 and float(torch.tensor(eps, dtype=first.dtype)) == 0
        names = [self._context.names.parameter_name(p) or f"of shape {tuple(p.shape)}" for p, _ in broken]
        self._first = Broken(names, first.dtype, self._before[id(first)], eps if vanishes else None, self._context.locator.here(3))

    @property
    def found(self) -> bool:
        return self._first is not None

    def findings(self) -> list[Finding]:
        if self._first is None:
            return []
        first = self._first
        word, site = dtype_name(first.dtype), first.site
        if first.gradient:
            cause = f"the gradient of {first.names[0]} contained {first.gradient}, and the optimizer applied it"
            fix = "skip such a step: torch.nn.utils.clip_grad_norm_(..., error_if_nonfinite=True) raises, torch.amp.GradScaler skips; then "
            fix += "look for what overflows before it"
        elif first.eps is not None:
            cause = f"eps={first.eps:g} is 0 in {word}, in which this optimizer keeps its states: where a squared gradient is 0 too, the "
            cause += "update is 0 / 0"
            fix = f"keep fp32 parameters (fp32 master weights) and let autocast lower the compute, or an eps that {word} holds (1e-4)"
        else:
            cause = f"the update of {first.names[0]} left the range of {word}; its gradient was finite"
            fix = "keep fp32 parameters (fp32 master weights), or lower the learning rate"
        shown = listed(first.names, 4)
        return [
            Finding(
                code="TR028",
                severity=Severity.WARNING,
                message=f"an optimizer step makes {word} weights inf or NaN: {shown}",
                place=place_of(site, first.names[0]),
                cause=cause,
                fix=fix,
                details=(("stepped at", f"{site}: {site.text}"),) if site is not None else (),
            )
        ]


def _stepped(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    return [(p, group) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def unfit(x: torch.Tensor | None) -> str:
    """ "NaN" or "inf" where a dense tensor holds one."""
    if x is None or x.layout != torch.strided or x.device.type == "meta" or not x.is_floating_point():
        return ""
    # the sum of a finite tensor may overflow; min and max are exact, and NaN if any is
    low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
    return "NaN" if low != low else "inf" if max(-low, high) == float("inf") else ""
