"""Two ordinary runs, one after the other, that end within five minutes: a finished one is not repeated, an interrupted one is resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..entry.train import train
from ..errors import UsageError
from ..training.callbacks import Callback, Moment

TRAIN_SECONDS = 180.0  # of the steps of both stages, as planned
LEAST = 0.1  # of the steps, by plan: below it an untrained model's answers can hardly be told from a trained one's


@dataclass(frozen=True)
class Stage:
    """One run: its file NAME.yaml lies beside this one, its folder is NAME.

    steps  of its file
    least  steps that are done on any machine
    cost   seconds of a step for each of a step of the first stage
    """

    name: str
    what: str
    steps: int
    least: int
    cost: float = 1.0


class EndsInTime(Callback):
    """Stops a stage when its share of the time is over.

    pauses  what is still to come beside steps, in starts of a stage: they have the same parts
    """

    def __init__(self, ends: float, stage: Stage, share: float, pauses: int) -> None:
        self.ends, self.stage, self.share, self.pauses = ends, stage, share, pauses
        self.begun = self.first = self.last = time.monotonic()
        self.until, self.steps, self.per_step = math.inf, 0, 0.0

    def on_step(self, moment: Moment) -> None:
        self.last = time.monotonic()
        if math.isinf(self.until):
            self.first, self.steps = self.last, moment.step
            self.until = self.last + self.share * (self.ends - self.last - self.pauses * (self.last - self.begun))
        if self.last >= self.until and self.stage.least <= moment.step < moment.total:
            print(f"speed     ends at step {moment.step}, to take five minutes: other programs use the cores")
            moment.stop()
        self.per_step = (self.last - self.first) / max(1, moment.step - self.steps)

    def left_for(self, second: Stage) -> float:
        """The share of the second stage's steps for which there is time, at the speed of this one."""
        left = self.ends - time.monotonic() - 2 * (self.first - self.begun)
        return left / (second.cost * second.steps * self.per_step) if self.per_step else 1.0


def write_folder(folder: Path, name: str, stages: Sequence[Stage], parts: Sequence[str], make: Callable[[], None]) -> None:
    """Makes the folder and what both stages read, once. The stages' files come last: with them the folder is complete.

    parts   names of what `make` writes
    Raises  UsageError for a folder that holds other files
    """
    files = [f"{stage.name}.yaml" for stage in stages]
    if (folder / files[-1]).is_file():
        return
    if folder.exists() and (not folder.is_dir() or any(path.name not in (*parts, *files) for path in folder.iterdir())):
        raise UsageError(f"{folder}: holds other files" if folder.is_dir() else f"{folder}: is a file", fix=f"{name} --folder OTHER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make()
        for file in files:
            text = Path(__file__).with_name(file).read_text(encoding="utf-8")
            inside = json.dumps(f"{folder}/")[1:-1]  # as it stands in a quoted string
            (folder / file).write_text(text.replace('"quickstart/', f'"{inside}'), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror}", fix=f"{name} --folder OTHER") from None


def planned(stages: Sequence[Stage], step_seconds: float) -> float:
    """The share of the steps that both stages do, at so many seconds for a step of the first."""
    needed = step_seconds * sum(stage.cost * stage.steps for stage in stages)
    return max(LEAST, min(1.0, TRAIN_SECONDS / needed)) if needed else 1.0


def run_stage(folder: Path, stage: Stage, *, share: float, callbacks: Sequence[Callback] = ()) -> bool:
    """Trains as the stage's file says; False when it was interrupted and saved.

    share   of the steps in the file. A shortened stage is evaluated and sampled at its start and its end alone, for each takes as long as
            many steps.
    """
    run, steps = folder / stage.name, max(1, round(share * stage.steps))
    if _status(run) == "done":
        print(f"done before: {run}")
    elif (run / "resolved.yaml").is_file():
        train(resume=run, callbacks=callbacks)
    else:
        fewer = {} if share == 1.0 else {"steps": steps, "eval_every": max(1, steps // 2)}
        shown = {} if share == 1.0 else {"sample_every": steps}
        train(folder / f"{stage.name}.yaml", train=fewer, run=shown, callbacks=callbacks)
    return _status(run) == "done"


def run_stages(
    folder: Path, stages: tuple[Stage, Stage], *, share: float | None, ends: float,
    step_seconds: Callable[[], float], between: Callable[[], None] = lambda: None,
) -> bool:  # fmt: skip
    """Both stages; False when one was interrupted and saved.

    share         of the steps; None: as many as end at `ends` (time.monotonic), by the speed of this machine
    step_seconds  measures a step of the first stage
    between       what the second stage needs of the first one's result
    """
    first, second = stages
    in_time = share is None
    if share is None:
        seconds = step_seconds()
        share = planned(stages, seconds)
        if share < 1:
            print(
                f"speed     {1000 * seconds:.0f} ms a step: both stages are shortened to {share:.0%} of their steps, to take five minutes"
            )
    print(f"\n1/2  {first.what}  ({folder / first.name}.yaml)")
    clock = EndsInTime(ends, first, first.steps / (first.steps + second.cost * second.steps), 3)
    if not run_stage(folder, first, share=share, callbacks=[clock] if in_time else []):
        return False
    between()
    print(f"\n2/2  {second.what}  ({folder / second.name}.yaml)")
    if in_time:
        share = max(LEAST, min(share, clock.left_for(second)))
    callbacks = [EndsInTime(ends, second, 1.0, 1)] if in_time else []
    return run_stage(folder, second, share=share, callbacks=callbacks)


def _status(run: Path) -> str:
    try:
        return str(json.loads((run / "result.json").read_text(encoding="utf-8")).get("status"))
    except (OSError, ValueError, AttributeError):
        return ""


def timed(step: Callable[[], object], times: int = 12) -> float:
    """Seconds of a step: the lower quartile of so many, since other programs slow some of them; the first starts the threads."""
    seen = []
    for _ in range(times):
        begin = time.perf_counter()
        step()
        seen.append(time.perf_counter() - begin)
    return sorted(seen[1:])[times // 4]
