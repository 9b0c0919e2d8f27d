"""A user's own code at the loop's moments: after a step, an evaluation, a save, a round of samples.

A callback may read everything, generate, log, write files and ask the run to stop. It may not change the weights: the run would no longer
be the one that its folder describes, so that is an error. Random state and the modules' modes are put back after each call: training goes
on bit for bit as without callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import RunError
from .undisturbed import modes_restored, random_state_restored


@dataclass(frozen=True)
class Moment:
    """Where the run is.

    step, total  optimizer steps done, and in all
    row          what metrics.jsonl got: loss, learning rate, ...; of samples: `{"samples": [...]}`; of a save: its folder
    model        with its adapter, under the run's precision; weights are not to be changed
    folder       the run's folder
    """

    step: int
    total: int
    row: Mapping[str, Any]
    model: nn.Module
    folder: Path
    _asked: list[bool] = field(default_factory=list, repr=False)

    def stop(self) -> None:
        """Asks the run to save and end after this step, as early stopping does. The result is made."""
        self._asked.append(True)


class Callback:
    """Override what you need. An exception stops the run; the last checkpoint stays."""

    def on_step(self, moment: Moment) -> None:
        """After each step that is logged (`run.log_every`)."""

    def on_evaluation(self, moment: Moment) -> None: ...

    def on_save(self, moment: Moment) -> None:
        """After a checkpoint is whole on the disk."""

    def on_samples(self, moment: Moment) -> None: ...


def tell(callbacks: Sequence[Callback], name: str, moment: Moment) -> bool:
    """Calls `on_NAME` of each; whether one asked to stop. Raises RunError CB001 when one changed a weight."""
    parameters = dict(moment.model.named_parameters())
    for callback in callbacks:
        before = {key: (id(p), p._version) for key, p in parameters.items()}
        with random_state_restored(), modes_restored(moment.model):
            getattr(callback, f"on_{name}")(moment)
        now = {key: (id(p), p._version) for key, p in moment.model.named_parameters()}
        changed = next((key for key in before.keys() | now.keys() if before.get(key) != now.get(key)), None)
        if changed is not None:
            raise RunError(
                f"step {moment.step}: {type(callback).__name__}.on_{name} changed {changed}", code="CB001",
                fix="a callback may read weights, not change them: work on a copy (copy.deepcopy), or make it part of the objective",
            )  # fmt: skip
    return bool(moment._asked)
