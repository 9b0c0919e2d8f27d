"""Guards that round away (an eps that is 0, a bound that is 0 or 1 in the dtype of the tensor), and variances that cancel.

A variance as the mean of squares minus the square of the mean, in low precision: for a large mean only rounding is left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from ....dtypes import eps
from ....dtypes import name as dtype_name
from ....finding import Finding, Severity
from ....observe.operators import LOW, Operator
from ....observe.origin import Site, here, place_of
from ..context import After, Before, Context, Watcher, now_and_then

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

    def added(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before `tensor + 1e-8` on a low-precision tensor: where the tensor is zero, the sum stays zero."""
        tensor, eps = args[0], args[1]
        if type(eps) is not float or not isinstance(tensor, torch.Tensor) or tensor.dtype not in LOW:
            return
        if not 0 < eps < _SMALL or _held(eps, tensor.dtype) != 0 or self._context.updates.in_step:
            return
        site = self._due()
        if site is not None and bool((tensor.detach() == 0).any()):
            self._found[site] = Guard(eps, 0.0, tensor.dtype, False, site)

    def clamped(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
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
        site = here()
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


_LOOKS_CANCELLATION = 8  # calls of a line whose values are looked at, then those whose number is a power of two
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

    def subtracting(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Before `mean_of_squares - mean * mean`."""
        squares, square = args[0], args[1]
        if not isinstance(square, torch.Tensor) or squares.dtype not in LOW or square.dtype != squares.dtype or square.grad_fn is None:
            return
        if squares.grad_fn is None or square.grad_fn.name() not in _SQUARES or squares.grad_fn.name() not in _MEANS:
            return
        site = here()
        self._looked[site] += 1
        if site in self._found or not now_and_then(self._looked[site], _LOOKS_CANCELLATION):
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
        return [_finding_cancellation(cancelled) for cancelled in self._found.values()]


def _finding_cancellation(cancelled: Cancelled) -> Finding:
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
