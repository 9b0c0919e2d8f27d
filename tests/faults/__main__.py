"""`python -m tests.faults`: the campaign. Exit status 0 when every trial passed, 1 when one did
not.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from isotype.errors import IsotypeError

from . import fuzz
from .corruption import corruption_trials
from .disk import disk_trials
from .kills import CELLS, SLICE, kill_trials, matrix_trials
from .nonfinite import nan_trials
from .ranks import rank_trials
from .trial import Trial, as_lines, summarise
from .workshop import Workshop

DEFAULT = ("kills", "disk", "corruption", "nan")


def main() -> int:
    """Do to runs what happens to runs, and see that each survives and ends bit-identical to the
    undisturbed one.

    Trains models of 120,000 parameters through the real command line, each command a process of its
    own.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=main.__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(DEFAULT)}: the default. And matrix, ranks, fuzz.",
    )
    parser.add_argument("--kills", type=int, default=200, help="How many SIGKILLs.")
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="How many hostile inputs for fuzz."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of every random moment and place.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="A slice by counts: 3 kills, 4 cells, 400 hostile inputs, 9 others.",
    )
    parser.add_argument(
        "--folder", type=Path, help="Where runs go, kept afterwards. Default: a temporary one."
    )
    parser.add_argument("--json", action="store_true", help="One JSON object on stdout.")
    asked = parser.parse_args()
    quick, seed = asked.quick, asked.seed
    kills, inputs = (
        (min(asked.kills, 1), min(asked.inputs, 400)) if quick else (asked.kills, asked.inputs)
    )
    place = asked.folder or Path(tempfile.mkdtemp(prefix="isotype-faults-"))
    imports()
    workshop = Workshop(place)
    planned: dict[str, Callable[[], Iterator[Trial | int]]] = {
        "kills": lambda: kill_trials(workshop, kills=kills, seed=seed),
        "disk": lambda: disk_trials(workshop, sizes=1 if quick else 20, seed=seed),
        "corruption": lambda: corruption_trials(workshop, flips=0 if quick else 5, seed=seed),
        "nan": lambda: nan_trials(workshop, times=0 if quick else 3, seed=seed),
        "matrix": lambda: matrix_trials(workshop, cells=SLICE if quick else CELLS),
        "ranks": lambda: rank_trials(workshop, kills=2 if quick else 20, seed=seed),
        "fuzz": lambda: fuzz.fuzz_trials(workshop, inputs=inputs, seed=seed),
    }
    if unknown := set(asked.parts) - set(planned):
        parser.error(f"no such part: {', '.join(unknown)}")
    started, trials = time.monotonic(), list[Trial]()
    for part in dict.fromkeys(asked.parts or DEFAULT):
        done = 0
        # of fuzz also numbers of inputs, where a trial would be too many lines
        for trial in planned[part]():
            done += trial if isinstance(trial, int) else int(part != "fuzz")
            print(f"{part}: {done:,} done", file=sys.stderr)
            trials += [trial] if isinstance(trial, Trial) else []
    failed = sum(not trial.passed for trial in trials)
    if asked.folder is None and not failed:
        shutil.rmtree(place, ignore_errors=True)
    kept, seconds, rows = (
        str(place) if place.exists() else None,
        time.monotonic() - started,
        summarise(trials),
    )
    if asked.json:
        print(
            json.dumps(
                {
                    "trials": len(trials),
                    "failed": failed,
                    "seconds": round(seconds, 1),
                    "rows": rows,
                    "kept": kept,
                }
            )
        )
    else:
        print(
            *as_lines(rows),
            f"\n{len(trials)} trials, {failed} failed, {seconds:.0f} s",
            f"kept: {kept}" if kept else "",
            sep="\n",
        )
    return int(not trials or failed > 0)


def imports() -> None:
    """What every child would import, once. Nothing is computed here: thread pools do not survive a
    fork.
    """
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    from isotype.cli.app import build_app
    from isotype.training import run
    from tests.api import finish  # noqa: F401

    build_app()
    run.quiet_libraries()
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401


if __name__ == "__main__":
    try:
        sys.exit(main())
    except IsotypeError as error:
        print(f"isotype: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
