"""Executes two ordinary runs one after the other, each with a time limit. A finished run is not
repeated, and an interrupted run is resumed.
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
    """One run. Its configuration is NAME.yaml in this package, and its folder is NAME.

    steps    the number of steps in its configuration
    seconds  the time limit. A slow machine then ends the run early and saves the result
    min_steps  the minimum number of steps on any machine
    """

    name: str
    description: str
    steps: int
    seconds: float
    min_steps: int


class StopAtDeadline(Callback):
    """Stops a stage at its time limit."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.deadline = 0.0

    def on_step(self, moment: Moment) -> None:
        current_time = time.monotonic()
        self.deadline = self.deadline or current_time + self.stage.seconds
        if current_time >= self.deadline and self.stage.min_steps <= moment.step < moment.total:
            print(
                f"speed     ends at step {moment.step} of {moment.total}, to take about five"
                " minutes in all"
            )
            moment.stop()


def run_quickstart(
    folder: Path,
    command: str,
    stages: Sequence[Stage],
    input_names: Sequence[str],
    *,
    write_inputs: Callable[[], None],
    step_share: float,
    json_output: bool,
    summarise: Callable[[], dict[str, Any]],
    print_summary: Callable[[dict[str, Any]], None],
    prepare_second_stage: Callable[[], None] = lambda: None,
) -> int:
    """Runs both stages and prints the result. Returns the exit status: 0 if both stages are
    finished, or 130 if a run was interrupted and saved.

    input_names  the names of the files that `write_inputs` writes into the folder
    prepare_second_stage  prepares the second stage from the result of the first
    step_share   the fraction of the configured steps to execute
    json_output  prints only a JSON object to stdout; other output goes to stderr
    """
    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        write_folder(folder, command, stages, input_names, write_inputs)
        if not run_stages(
            folder, stages, step_share=step_share, prepare_second_stage=prepare_second_stage
        ):
            print(f"go on with: {command} --folder {folder}")
            return 130
        summary = summarise()
    if json_output:
        results = {
            stage.name: RunFolder(folder / stage.name).read_json("result.json") for stage in stages
        }
        print(json.dumps({"folder": str(folder), **results, **summary}))
    else:
        shortened = describe_shortened(folder, stages)
        if shortened:
            print("\n" + "\n".join(shortened))
            print("so the results below are those of a shortened run; a full run does better")
        print_summary(summary)
    return 0


def write_folder(
    folder: Path,
    command: str,
    stages: Sequence[Stage],
    input_names: Sequence[str],
    write_inputs: Callable[[], None],
) -> None:
    """Creates the folder and the inputs of both stages, unless they already exist. The
    configuration files are written last, so the folder is complete if they exist.

    input_names  the names of the files that `write_inputs` writes
    Raises  UsageError for a folder that holds other files
    """
    files = [f"{stage.name}.yaml" for stage in stages]
    if (folder / files[-1]).is_file():
        return
    if folder.exists() and (
        not folder.is_dir()
        or any(path.name not in (*input_names, *files) for path in folder.iterdir())
    ):
        raise UsageError(
            f"{folder}: holds other files" if folder.is_dir() else f"{folder}: is a file",
            fix=f"{command} --folder OTHER",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs()
        for file in files:
            text = Path(__file__).with_name(file).read_text(encoding="utf-8")
            escaped_folder = json.dumps(f"{folder}/")[1:-1]  # escaped for a quoted string
            (folder / file).write_text(
                text.replace('"quickstart/', f'"{escaped_folder}'), encoding="utf-8"
            )
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written: {error.strerror}", fix=f"{command} --folder OTHER"
        ) from None


def describe_shortened(folder: Path, stages: Sequence[Stage]) -> list[str]:
    """Returns a line for each stage that ended before its configured steps, with the fraction of
    its steps that it completed, and the command that executes the remaining steps.
    """
    lines = []
    for stage in stages:
        run = RunFolder(folder / stage.name)
        total = run.read_json("plan.json").get("total")
        steps = run.read_json("result.json").get("steps")
        if type(total) is int and type(steps) is int and steps < total:
            lines.append(
                f"cut short {stage.name} made {steps} of {total} steps ({steps / total:.0%}), because"
                f" this machine is slow or busy; all of them: isotype train"
                f" {folder / f'{stage.name}.yaml'} run.folder=runs/{stage.name}"
            )
    return lines


def run_stages(
    folder: Path,
    stages: Sequence[Stage],
    *,
    step_share: float,
    prepare_second_stage: Callable[[], None],
) -> bool:
    """Runs the stages. Returns False if a run was interrupted and saved."""
    for number, stage in enumerate(stages, start=1):
        print(f"\n{number}/{len(stages)}  {stage.description}  ({folder / stage.name}.yaml)")
        run = folder / stage.name
        callbacks = [StopAtDeadline(stage)]
        if RunFolder(run).read_json("result.json").get("status") == "done":
            print(f"done before: {run}")
        elif (run / "resolved.yaml").is_file():
            train(resume=run, callbacks=callbacks)
        else:
            overrides = (
                {} if step_share == 1.0 else {"steps": max(1, round(step_share * stage.steps))}
            )
            train(folder / f"{stage.name}.yaml", train=overrides, callbacks=callbacks)
        if RunFolder(run).read_json("result.json").get("status") != "done":
            return False
        if number == 1:
            prepare_second_stage()
    return True
