"""Sends each row of metrics.jsonl and each round of samples to every tracker of a run.

A tracker must not disturb a run: random state is restored after each call, and a tracker that fails (a full disk, a lost network) is named
once and then switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..task import Sample
from ..undisturbed import random_state_restored

Say = Callable[[str], None]


class Tracker(Protocol):
    """`scalars` are named `train/loss`, `eval/loss`; `address` is the folder or page where the user finds them."""

    name: str
    address: str

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def samples(self, step: int, samples: Sequence[Sample]) -> None: ...
    def close(self, exit_status: int) -> None: ...


class Trackers:
    """None, one or several."""

    def __init__(self, trackers: Iterable[Tracker] = (), say: Say = print) -> None:
        self._trackers, self._say = list(trackers), say

    def row(self, facts: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        side = "eval" if facts.get("event") == "evaluation" else "train"
        values = {
            f"{side}/{key.removeprefix('eval_')}": float(value)
            for key, value in facts.items()
            if key != "step" and isinstance(value, int | float)
        }
        if values:
            self._each(lambda tracker: tracker.scalars(int(facts["step"]), values))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._each(lambda tracker: tracker.samples(step, samples))

    def close(self, exit_status: int) -> None:
        self._each(lambda tracker: tracker.close(exit_status))
        self._trackers.clear()

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        if not self._trackers:
            return
        with random_state_restored():
            for tracker in list(self._trackers):
                try:
                    tell(tracker)
                except Exception as error:  # an error of a service must not stop the run
                    self._trackers.remove(tracker)
                    first = next(iter(str(error).splitlines()), type(error).__name__)
                    self._say(f"tracker   {tracker.name} failed and is switched off: {first}")


def start(names: Sequence[str], folder: Path, settings: Mapping[str, Any], say: Say) -> Trackers:
    """Opens the trackers of `run.trackers` in the run folder and says where each writes.

    settings  the run's configuration, section by section
    """
    found: list[Tracker] = []
    with random_state_restored():
        for name in dict.fromkeys(names):
            if name == "tensorboard":
                from .tensorboard import TensorBoard

                found.append(TensorBoard(folder, settings))
            else:
                from .wandb import WeightsAndBiases

                found.append(WeightsAndBiases(folder, settings, say))
            say(f"tracker   {found[-1].name}: {found[-1].address}")
    return Trackers(found, say)
