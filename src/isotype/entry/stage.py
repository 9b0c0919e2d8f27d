"""One stage of a quickstart: an ordinary run, which is not repeated when it is finished, and resumed when it was interrupted."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.load import LoadedConfig
from ..runs.folder import RunFolder
from ..tasks.choose import train
from ..training.callbacks import Callback, Moment, Objective
from ..training.console import RunConsole

if TYPE_CHECKING:
    from ..training.callbacks import Callback


def run_stage(run: Path, file: Path, *, json_output: bool, callbacks: Sequence[Callback] = ()) -> int:
    """Trains as `file` says, in the folder `run`. Returns the exit status: 0, or 130 when interrupted and saved.

    callbacks    called after steps, evaluations, saves and samples
    json_output  everything goes to stderr, since stdout belongs to the one object that the quickstart prints at its end
    """
    from ..config.load import load

    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        if finished(run):
            print(f"done before: {run}")
            return 0
        return start(load(file, [], {}), resume=run if (run / "resolved.yaml").is_file() else None, callbacks=callbacks).status


def finished(run: Path) -> bool:
    try:
        done: bool = json.loads((run / "result.json").read_text(encoding="utf-8")).get("status") == "done"
        return done
    except (OSError, ValueError, AttributeError):
        return False


def quoted(value: object) -> str:
    """A YAML scalar: JSON's strings are YAML's double-quoted ones."""
    return json.dumps(str(value))


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    status  the exit status: 0 done, 130 interrupted
    folder  the run's
    begun   whether the folder holds a run; a run that was interrupted before its first step leaves none
    """

    status: int
    folder: Path
    begun: bool


def start(
    loaded: LoadedConfig, *, resume: Path | None = None, console: RunConsole | None = None, skips: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (), objective: Objective | None = None,
) -> Ended:  # fmt: skip
    """Runs to the end, or saves on Ctrl-C. Raises IsotypeError.

    resume     the folder of the run to go on with
    console    shows the progress; by default on stdout
    skips      checks of the preflight to leave out, code to reason
    callbacks  called after steps, evaluations, saves and samples
    objective  computes the losses instead of the task's function
    """
    console = console or RunConsole()
    status = train(loaded, resume=resume, console=console, skips=skips, callbacks=callbacks, objective=objective)
    folder = Path(console.result["folder"])
    return Ended(status, folder, RunFolder(folder).is_run)


class StageTime(Callback):
    """The time of two stages, one after the other, that are to end together within `most` seconds from now.

    The end of a stage (evaluation, samples, saving, the check of the result) is not known before the first one has ended: until then it is
    taken to last as long as the stage's start, which has the same parts.

    share  of the seconds for steps, those that the first stage has
    least  stage -> steps that are done in any case
    after  seconds, as a share of those that the command took before the first stage, for what follows the second
    """

    def __init__(
        self, most: float, *, share: float, least: Mapping[str, int], after: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._began = clock, clock()
        self._ends, self._share, self._least, self._after = self._began + most, share, least, after
        self._stage, self._begun, self._last = "", self._began, self._began
        self._steps_end = self._ends
        self._start = self._end = 0.0
        self._first = True
        self.stopped_at: int | None = None

    @property
    def left(self) -> float:
        """Seconds for the steps of the second stage, once the first has ended."""
        return self._ends - self._clock() - self._start - self._end

    def begin(self, stage: str) -> None:
        if self._first and not self._stage:
            self._ends -= self._after * (self._clock() - self._began)
        self._stage, self._begun, self._start, self.stopped_at = stage, self._clock(), 0.0, None
        self._steps_end = self._ends - self._end

    def on_step(self, moment: Moment) -> None:
        self._last = self._clock()
        if not self._start:
            self._start = self._last - self._begun
            if self._first:  # its own end, and start and end of the second stage, are still to come
                self._steps_end = self._last + self._share * (self._ends - self._last - 3 * self._start)
        if self._last >= self._steps_end and self._least[self._stage] <= moment.step < moment.total:
            self.stopped_at = moment.step
            moment.stop()

    def end(self) -> None:
        """A stage has ended."""
        self._end, self._first = (self._clock() - self._last if self._start else 0.0), False


def timed(step: Callable[[], object], times: int) -> float:
    """Seconds of a step: the lower quartile of so many, since other programs slow some of them; the first starts the threads."""
    seen = []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        seen.append(time.perf_counter() - begin)
    return sorted(seen[1:])[times // 4]
