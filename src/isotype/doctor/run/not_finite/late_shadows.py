"""Finds the line whose rounding moves a value out of the domain of a later operator.

A log-probability is computed in bf16 and cast to fp32, and then `torch.log(1 - torch.exp(logp))` is
NaN, because the log-probability became positive. The subtraction in fp32 is not the cause. To find
it, the step runs again, and the shadows in fp32 begin at a later operator each time. The last
operator from which on fp32 gives a finite result is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ....observe.operators import Operator
from ....observe.origin import Site
from .lost_numbers import collect_results
from .shadows import Shadows
from .trials import Trial, TrialEnd


@dataclass(frozen=True, slots=True)
class Rounding:
    """An operator of forward whose result is narrower than fp32.

    ordinal  the number of operators of the run up to this operator
    """

    ordinal: int
    site: Site | None
    dtype: torch.dtype


class LateShadows(Trial):
    """Runs the operators of a step, the operators from a given one on also in fp32. The answer is
    whether the fp32 result of the operator in question is finite.

    start  the number of the first operator that also runs in fp32
    """

    def __init__(self, start: int, ordinal: int) -> None:
        super().__init__(ordinal)
        self._shadows = Shadows()
        self._start = start

    def _compute(
        self, op: Operator, args: tuple, kwargs: dict, find_site: Callable[[], Site | None]
    ) -> tuple[tuple, Any]:
        is_late = self._count >= self._start
        finish = self._shadows.prepare(op, args, kwargs) if is_late else None
        result = op.func(*args, **kwargs)
        if finish is not None:
            finish(result)
        return args, result

    def _is_result_finite(self, op: Operator, args: tuple, result: Any) -> bool:
        shadows = [self._shadows.get(tensor) for tensor in collect_results(op, args, result)]
        return all(bool(shadow.isfinite().all()) for shadow in shadows)


def find_last_rounding(
    roundings: Sequence[Rounding], ordinal: int, run_again: Callable[[LateShadows], Any]
) -> Rounding | None:
    """Returns the last operator for which it is enough that it and the operators after it run in
    fp32, so that the result of a later operator is finite. Returns None if there is none.

    ordinal    the number of the later operator
    run_again  runs the step through a trial
    """
    candidates = [rounding for rounding in roundings if rounding.ordinal <= ordinal]
    last: Rounding | None = None
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        trial = LateShadows(candidates[middle].ordinal, ordinal)
        with suppress(TrialEnd):
            run_again(trial)
        if trial.is_finite:
            last = candidates[middle]
            low = middle + 1
        else:
            high = middle
    return last
