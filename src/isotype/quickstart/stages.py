"""Two ordinary runs, one after the other, each ended after its time: a finished one is not
repeated, an interrupted one is resumed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..entry.train import train
from ..errors import UsageError
from ..runs.folder import RunFolder
from ..training.callbacks import Callback, Moment


@dataclass(frozen=True)
class Stage:
    """One run: its file NAME.yaml lies beside this one, its folder is NAME.

    steps    of its file
    seconds  after which it ends, with its result saved: on a slow machine before its last step
    least    steps that are done on any machine
    """

    name: str
    description: str
    steps: int
    seconds: float
    least: int


class StopAtDeadline(Callback):
    """Stops a stage when its time is over."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.deadline = 0.0

    def on_step(self, moment: Moment) -> None:
        current_time = time.monotonic()
        self.deadline = self.deadline or current_time + self.stage.seconds
        if current_time >= self.deadline and self.stage.least <= moment.step < moment.total:
            print(
                f"speed     ends at step {moment.step} of {moment.total}, to take about five"
                " minutes in all"
            )
            moment.stop()


def run_quickstart(
    folder: Path,
    command: str,
    stages: Sequence[Stage],
    parts: Sequence[str],
    *,
    make: Callable[[], None],
    share: float,
    json_output: bool,
    summarise: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    between: Callable[[], None] = lambda: None,
) -> int:
    """Runs both stages and shows the result. Returns the exit status: 0, or 130 when interrupted
    and saved.

    parts        names of what `make` writes into the folder
    between      what the second stage needs of the first one's result
    share        of the steps that are done
    json_output  everything but one object at the end goes to stderr
    """
    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        write_folder(folder, command, stages, parts, make)
        if not run_stages(folder, stages, share=share, between=between):
            print(f"go on with: {command} --folder {folder}")
            return 130
        summary = summarise()
    if json_output:
        results = {
            stage.name: RunFolder(folder / stage.name).read_json("result.json") for stage in stages
        }
        print(json.dumps({"folder": str(folder), **results, **summary}))
    else:
        show(summary)
    return 0


def write_folder(
    folder: Path, name: str, stages: Sequence[Stage], parts: Sequence[str], make: Callable[[], None]
) -> None:
    """Makes the folder and what both stages read, once. The stages' files come last: with them the
    folder is complete.

    parts   names of what `make` writes
    Raises  UsageError for a folder that holds other files
    """
    files = [f"{stage.name}.yaml" for stage in stages]
    if (folder / files[-1]).is_file():
        return
    if folder.exists() and (
        not folder.is_dir() or any(path.name not in (*parts, *files) for path in folder.iterdir())
    ):
        raise UsageError(
            f"{folder}: holds other files" if folder.is_dir() else f"{folder}: is a file",
            fix=f"{name} --folder OTHER",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make()
        for file in files:
            text = Path(__file__).with_name(file).read_text(encoding="utf-8")
            inside = json.dumps(f"{folder}/")[1:-1]  # as it stands in a quoted string
            (folder / file).write_text(text.replace('"quickstart/', f'"{inside}'), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written: {error.strerror}", fix=f"{name} --folder OTHER"
        ) from None


def run_stages(
    folder: Path, stages: Sequence[Stage], *, share: float, between: Callable[[], None]
) -> bool:
    """Both stages as their files say; False when one was interrupted and saved."""
    for number, stage in enumerate(stages, start=1):
        print(f"\n{number}/{len(stages)}  {stage.description}  ({folder / stage.name}.yaml)")
        run = folder / stage.name
        clock = [StopAtDeadline(stage)]
        if RunFolder(run).read_json("result.json").get("status") == "done":
            print(f"done before: {run}")
        elif (run / "resolved.yaml").is_file():
            train(resume=run, callbacks=clock)
        else:
            fewer = {} if share == 1.0 else {"steps": max(1, round(share * stage.steps))}
            train(folder / f"{stage.name}.yaml", train=fewer, callbacks=clock)
        if RunFolder(run).read_json("result.json").get("status") != "done":
            return False
        if number == 1:
            between()
    return True
