"""`python -m tests.faults`: the campaign. Exit status 0 when every trial passed, 1 when one did not."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from isotype.errors import IsotypeError

from . import fuzz
from .corruption import corruption_trials
from .disk import disk_trials
from .kills import CELLS, SLICE, kill_trials, matrix_trials
from .nonfinite import nan_trials
from .ranks import rank_trials
from .trial import Trial, as_lines, summarise
from .workshop import Workshop


class Part(StrEnum):
    kills = "kills"
    disk = "disk"
    corruption = "corruption"
    nan = "nan"
    matrix = "matrix"
    ranks = "ranks"
    fuzz = "fuzz"


ALL = (Part.kills, Part.disk, Part.corruption, Part.nan)


def faults(
    parts: Annotated[
        list[Part] | None,
        typer.Argument(metavar="[PART ...]", help="kills, disk, corruption, nan: the default. And matrix, ranks, fuzz."),
    ] = None,
    kills: Annotated[int, typer.Option("--kills", min=1, help="How many SIGKILLs.")] = 200,
    inputs: Annotated[int, typer.Option("--inputs", min=1, help="How many hostile inputs for fuzz.")] = 100_000,
    seed: Annotated[int, typer.Option("--seed", help="Of every random moment and place.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A slice by counts: 3 kills, 4 cells, 400 hostile inputs, 9 others.")] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where runs go, kept afterwards. Default: a temporary one.", show_default=False)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Do to runs what happens to runs, and see that each survives and ends bit-identical to the undisturbed one.

    Trains models of 120,000 parameters through the real command line, each command a process of its own.

    For example `python -m tests.faults kills --kills 1000 --seed 1`.
    """
    wanted = list(dict.fromkeys(parts or ALL))
    kills, inputs = (min(kills, 3), min(inputs, 400)) if quick else (kills, inputs)
    started = time.monotonic()
    place = folder or Path(tempfile.mkdtemp(prefix="isotype-faults-"))
    trials: list[Trial] = []
    try:
        imports()
        workshop = Workshop(place)
        planned: dict[Part, Callable[[], Iterator[Trial | int]]] = {
            Part.kills: lambda: kill_trials(workshop, kills=kills, seed=seed),
            Part.disk: lambda: disk_trials(workshop, sizes=1 if quick else 20, seed=seed),
            Part.corruption: lambda: corruption_trials(workshop, flips=0 if quick else 5, seed=seed),
            Part.fuzz: lambda: fuzz.fuzz_trials(workshop, inputs=inputs, seed=seed),
            Part.matrix: lambda: matrix_trials(workshop, cells=SLICE if quick else CELLS),
            Part.ranks: lambda: rank_trials(workshop, kills=2 if quick else 20, seed=seed),
            Part.nan: lambda: nan_trials(workshop, times=0 if quick else 3, seed=seed),
        }
        for part in wanted:
            trials += _watched(part, planned[part]())
    finally:
        if folder is None and all(trial.passed for trial in trials):
            shutil.rmtree(place, ignore_errors=True)
    _show(trials, seconds=time.monotonic() - started, kept=place if place.exists() else None, json_output=json_output)
    raise typer.Exit(int(not trials or not all(trial.passed for trial in trials)))


def imports() -> None:
    """What every child would import, once. Nothing is computed here: thread pools do not survive a fork."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    from isotype.cli.app import build_app
    from isotype.training import finish, run  # noqa: F401

    build_app()
    run.quiet_libraries()
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401


def _watched(part: Part, trials: Iterator[Trial | int]) -> Iterator[Trial]:
    """The trials, each with a line on stderr. A part yields numbers of inputs where a trial would be too many lines."""
    done = 0
    for trial in trials:
        done += trial if isinstance(trial, int) else int(part != Part.fuzz)
        print(f"{part.value}: {done:,} done", file=sys.stderr)
        if isinstance(trial, Trial):
            yield trial


def _show(trials: list[Trial], *, seconds: float, kept: Path | None, json_output: bool) -> None:
    rows = summarise(trials)
    failed = sum(not trial.passed for trial in trials)
    if json_output:
        total: dict[str, Any] = {"trials": len(trials), "failed": failed, "seconds": round(seconds, 1)}
        print(json.dumps(total | {"rows": rows, "kept": str(kept) if kept else None}))
        return
    for line in as_lines(rows):
        print(line)
    print(f"\n{len(trials)} trials, {failed} failed, {seconds:.0f} s")
    if kept:
        print(f"kept: {kept}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(faults)
    try:
        app(prog_name="python -m tests.faults")
    except IsotypeError as error:
        print(f"isotype: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
