"""Every way through a function's undecided branches, one run at a time, up to a limit: first the way to what the rules ask about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_PATHS = 24


class Path:
    """Answers tests: first as prescribed, then as `leaning` says. The same test is answered alike all along one path."""

    def __init__(self, prescribed: tuple[bool, ...] = ()) -> None:
        self._prescribed = prescribed
        self.leaning = False
        self.taken: list[tuple[str, bool]] = []
        self._answers: dict[str, bool] = {}

    def take(self, test: str) -> bool:
        if test not in self._answers:
            position = len(self.taken)
            self._answers[test] = self._prescribed[position] if position < len(self._prescribed) else self.leaning
            self.taken.append((test, self._answers[test]))
        return self._answers[test]

    def answered(self, test: str) -> bool:
        return test in self._answers

    def told(self) -> tuple[str, ...]:
        return tuple(f"{test} is {str(answer).lower()}" for test, answer in self.taken)


def each_path(run: Callable[[Path], Any], limit: int = MAX_PATHS) -> None:
    """Calls `run` with every path, breadth first over the branches met, so that a limit cuts combinations and not branches."""
    waiting: list[tuple[bool, ...]] = [()]
    for count, prescribed in enumerate(waiting):  # grows while it is read
        if count >= limit:
            return
        path = Path(prescribed)
        run(path)
        answers = tuple(answer for _, answer in path.taken)
        waiting += [(*answers[:i], not answers[i]) for i in range(len(prescribed), len(answers))]
