"""Runs the operators of a step in another way, to prove what made a result not finite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ....observe.operators import Operator
from ....observe.origin import Site


class TrialEnd(BaseException):
    """Ends a trial after the operator whose result is in question."""


class Trial(ABC):
    """Runs the operators of a step in another way until a given operator, and records whether the
    result of this operator is finite.

    ordinal  the number of the operator whose result is in question
    """

    def __init__(self, ordinal: int) -> None:
        self.is_finite = False
        self._ordinal = ordinal
        self._count = 0

    def run(
        self, op: Operator, args: tuple, kwargs: dict, find_site: Callable[[], Site | None]
    ) -> Any:
        """Runs one operator.

        Raises  TrialEnd after the operator in question
        """
        self._count += 1
        args, result = self._compute(op, args, kwargs, find_site)
        if self._count == self._ordinal:
            self.is_finite = self._is_result_finite(op, args, result)
            raise TrialEnd
        return result

    @abstractmethod
    def _compute(
        self, op: Operator, args: tuple, kwargs: dict, find_site: Callable[[], Site | None]
    ) -> tuple[tuple, Any]:
        """Returns the arguments with which the operator ran, and its result."""

    @abstractmethod
    def _is_result_finite(self, op: Operator, args: tuple, result: Any) -> bool:
        """Returns the answer of the trial for the operator in question."""


# runs the operators of a step through a trial
RunTrial = Callable[[Trial], Any]
