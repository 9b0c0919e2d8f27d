"""Guards that round away: an eps that is 0 and a bound that is 0 or 1 in the dtype of the tensor they were to keep from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ....dtypes import name as dtype_name
from ....finding import Finding, Severity
from ..context import Context
from ..ops import LOW, Op
from ..pace import now_and_then
from ..source import Site, place_of
from ..watcher import After, Before, Watcher

_LOOKS = 16  # calls of a line whose values are looked at, then those whose number is a power of two
_SMALL = 1e-3  # what is added to keep from zero, and how far from 1 a bound may lie, at most


@dataclass(frozen=True, slots=True)
class Guard:
    given: float
    held: float
    dtype: torch.dtype
    bound: bool
    site: Site | None


class Guards(Watcher):
    """Looks at small numbers that are added, and at the bounds of clamps, where they change their meaning."""

    order = 65

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: dict[Site | None, Guard] = {}
        self._looked: Counter[Site | None] = Counter()

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"add": self.added, "clamp": self.clamped}

    def added(self, op: Op, args: tuple, kwargs: dict | None) -> None:
        """Before `tensor + 1e-8` on a low-precision tensor: where the tensor is zero, the sum stays zero."""
        tensor, eps = args[0], args[1]
        if type(eps) is not float or not isinstance(tensor, torch.Tensor) or tensor.dtype not in LOW:
            return
        if not 0 < eps < _SMALL or _held(eps, tensor.dtype) != 0 or self._context.updates.in_step:
            return
        site = self._due()
        if site is not None and bool((tensor.detach() == 0).any()):
            self._found[site] = Guard(eps, 0.0, tensor.dtype, False, site)

    def clamped(self, op: Op, args: tuple, kwargs: dict | None) -> None:
        """Before `tensor.clamp(1e-8, 1 - 1e-8)`: a bound that rounds to 0 or 1 lets them through."""
        tensor, given = args[0], (kwargs or {})
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in LOW:
            return
        bounds = (*args[1:3], *(None,) * (3 - len(args)))
        low, high = given.get("min", bounds[0]), given.get("max", bounds[1])
        for bound, lower in ((low, True), (high, False)):
            if not isinstance(bound, float) or (held := _held(bound, tensor.dtype)) == bound or held not in (-1.0, 0.0, 1.0):
                continue
            if abs(bound - held) > _SMALL:
                continue
            site = self._due()
            value = tensor.detach()
            if site is not None and bool(((value <= held) if lower else (value >= held)).any()):
                self._found[site] = Guard(bound, held, tensor.dtype, True, site)

    def _due(self) -> Site | None:
        site = self._context.locator.here(4)
        self._looked[site] += 1
        return site if site not in self._found and now_and_then(self._looked[site], _LOOKS) else None

    def findings(self) -> list[Finding]:
        return [_finding(guard) for guard in self._found.values()]


def _held(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _finding(guard: Guard) -> Finding:
    word, site = dtype_name(guard.dtype), guard.site
    given = f"{guard.given:.10g}"
    what = f"a bound of {given} is {guard.held:g} in {word}" if guard.bound else f"an eps of {given} is 0 in {word}"
    return Finding(
        code="TR030",
        severity=Severity.WARNING,
        message=f"{what}, so the guard has no effect",
        place=place_of(site),
        cause=f"the tensor is {word}, and {given} is taken in its dtype, where it rounds to {guard.held:g}; values that it "
        f"should keep away from {guard.held:g} are {guard.held:g} here, and their logarithm, quotient or root gives inf or NaN",
        fix="widen to fp32 before the guard (`x.float()`) and finish there, or use the stable form (logsigmoid, log_softmax, "
        f"binary_cross_entropy_with_logits); else a guard that {word} holds: torch.finfo(x.dtype).{'eps' if guard.held else 'tiny'}",
        details=(("at", f"{site}: {site.text}"),) if site is not None else (),
    )
