"""A variance as the mean of squares minus the square of the mean, in low precision: for a large mean only rounding is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ....dtypes import eps
from ....dtypes import name as dtype_name
from ....finding import Finding, Severity
from ..context import Context
from ..ops import LOW, Op
from ..pace import now_and_then
from ..source import Site, place_of
from ..watcher import After, Before, Watcher

_LOOKS = 8  # calls of a line whose values are looked at, then those whose number is a power of two
_ROUNDINGS = 4.0  # a difference of this many rounding errors of its operands has no correct digit
_MOST = 0.5  # of the elements
_SQUARES = ("MulBackward0", "PowBackward0")
_MEANS = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "DivBackward0")


@dataclass(frozen=True, slots=True)
class Cancelled:
    dtype: torch.dtype
    share: float
    site: Site | None


class Cancellation(Watcher):
    """Looks at differences of a mean and a square, which autograd's nodes tell."""

    order = 70

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: dict[Site | None, Cancelled] = {}
        self._looked: Counter[Site | None] = Counter()

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"sub": self.subtracting}

    def subtracting(self, op: Op, args: tuple, kwargs: dict | None) -> None:
        """Before `mean_of_squares - mean * mean`."""
        squares, square = args[0], args[1]
        if not isinstance(square, torch.Tensor) or squares.dtype not in LOW or square.dtype != squares.dtype or square.grad_fn is None:
            return
        if squares.grad_fn is None or square.grad_fn.name() not in _SQUARES or squares.grad_fn.name() not in _MEANS:
            return
        site = self._context.locator.here(3)
        self._looked[site] += 1
        if site in self._found or not now_and_then(self._looked[site], _LOOKS):
            return
        with torch.no_grad():
            one, other = squares.detach().float(), square.detach().float()
            if one.shape != other.shape or not one.numel() or bool((one < 0).any()) or bool((other < 0).any()):
                return
            near = (one - other).abs() <= _ROUNDINGS * eps(dtype_name(squares.dtype)) * one
            share = float((near & (one > 0)).float().mean())
        if share > _MOST:
            self._found[site] = Cancelled(squares.dtype, share, site)

    def findings(self) -> list[Finding]:
        return [_finding(cancelled) for cancelled in self._found.values()]


def _finding(cancelled: Cancelled) -> Finding:
    word, site = dtype_name(cancelled.dtype), cancelled.site
    return Finding(
        code="TR031",
        severity=Severity.WARNING,
        message=f"a variance is the difference of two nearly equal {word} numbers: it is mostly rounding error",
        place=place_of(site),
        cause=f"the mean of the squares and the square of the mean were rounded to {word} ({eps(word) / 2:.1e} of each) before one was "
        "subtracted from the other; where the mean is larger than the spread their difference is noise, zero, or negative, and "
        "1 / sqrt of it scales the whole row",
        observed=f"in {100 * cancelled.share:.0f}% of the rows the difference is within {_ROUNDINGS:g} roundings of its operands",
        fix="subtract the mean first, in fp32: `h = x.float(); h = h - h.mean(-1, keepdim=True); var = h.square().mean(-1, "
        "keepdim=True)`, or torch.nn.functional.layer_norm",
        details=(("at", f"{site}: {site.text}"),) if site is not None else (),
    )
