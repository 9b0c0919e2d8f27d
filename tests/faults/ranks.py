"""A run on two processes, of which one is killed, or both: at any moment, and right before any file
operation of the one that saves.

The process that is left must name the one that is gone, in one message, and end with status 1; then
the run goes on with two processes, and must end byte for byte as the undisturbed run on two
processes. They replicate the model, or share it (then each writes a part of a checkpoint).
"""

import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .child import HUNG, Child, Ended, before_operation, die, wait
from .trial import Trial, differences
from .workshop import RECIPES, Workshop

PROCESSES = 2
HOWS = (
    "the other process, by the clock",
    "the first process, by the clock",
    "the first process, before a file operation",
    "both, by the clock",
)
KINDS = ("replicate", "shard")
TIMEOUT = 30  # seconds for a process that was killed before it came


def rank_trials(workshop: Workshop, *, kills: int, seed: int) -> Iterator[Trial]:
    """`kills` runs, each killed once; the recipes, the ways to be killed and the kinds in turn."""
    moments = random.Random(seed)
    undisturbed: dict[tuple[str, str], tuple[Path, float]] = {}
    for number in range(kills):
        recipe, how = (
            list(RECIPES)[number % len(RECIPES)],
            HOWS[(number + number // len(RECIPES)) % len(HOWS)],
        )
        kind = KINDS[(number + number // (2 * len(RECIPES))) % len(KINDS)]
        shared = {"parallel": {"kind": kind, "timeout": TIMEOUT}}
        if (recipe, kind) not in undisturbed:
            folder = workshop.new_folder()
            ended = wait(
                together(workshop, ["train", str(workshop.settings(folder, recipe, **shared))])
            )
            if any(one.status for one in ended):
                yield Trial(part="ranks", what="undisturbed", wrong=[ended[0].output[-1500:]])
                return
            undisturbed[recipe, kind] = folder, ended[0].seconds
        yield _one(workshop, recipe, how, moments, shared, *undisturbed[recipe, kind])


def _one(
    workshop: Workshop,
    recipe: str,
    how: str,
    moments: random.Random,
    shared: dict[str, dict[str, Any]],
    undisturbed: Path,
    seconds: float,
) -> Trial:
    folder = workshop.new_folder()
    settings = workshop.settings(folder, recipe, **shared)
    killed = (1,) if how.startswith("the other") else (0, 1) if how.startswith("both") else (0,)
    before = (
        before_operation(moments.randint(1, workshop.operations(recipe)), die)
        if how.endswith("operation")
        else None
    )
    children = together(workshop, workshop.go_on(folder, settings), before=before)
    ended = wait(children, kill=() if before else killed, after=moments.uniform(0.1, seconds))
    wrong = [] if all(one.status == 0 for one in ended) else _wrong(ended, killed)
    again = wait(together(workshop, workshop.go_on(folder, settings)))
    different = []
    if any(one.status for one in again):
        wrong.append(
            f"did not go on: {' '.join(str(one.status) for one in again)}: {again[0].output[-1500:]}"
        )
    else:
        different = differences(folder, undisturbed)
    if not wrong and not different:
        shutil.rmtree(folder)
    return Trial(
        part="ranks", what=f"{shared['parallel']['kind']}: SIGKILL of {how}", wrong=wrong, different=different,
        message=next((line for one in ended for line in one.output.splitlines() if "MP00" in line), ""),
    )  # fmt: skip


def _wrong(ended: Sequence[Ended], killed: Sequence[int]) -> list[str]:
    """What was not as it should be about the end of a run that a kill met."""
    found = [f"rank {rank} hung" for rank, one in enumerate(ended) if one.status == HUNG]
    left = [
        (rank, one)
        for rank, one in enumerate(ended)
        if rank not in killed and one.status not in (0, -signal.SIGKILL)
    ]
    for rank, one in left:
        if one.status != 1:
            found.append(f"rank {rank} ended with {one.status}: {one.output[-500:]}")
        if "Traceback" in one.output:
            found.append(f"rank {rank} shows a traceback: {one.output[-1500:]}")
        if not any(f"rank {gone}" in one.error for gone in killed):
            found.append(f"rank {rank} does not name rank {killed[0]}: {one.output[-500:]}")
    return found


def together(
    workshop: Workshop, arguments: Sequence[str], *, before: Callable[[], None] | None = None
) -> list[Child]:
    """A command as several processes of one run, started by nobody: their variables are set here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def sit(rank: int) -> None:
        of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": PROCESSES,
            "LOCAL_WORLD_SIZE": PROCESSES,
            "MASTER_PORT": port,
        }
        os.environ.update(
            {name: str(value) for name, value in of_rank.items()} | {"MASTER_ADDR": "127.0.0.1"}
        )
        if rank == 0 and before is not None:
            before()

    return [
        Child(arguments, workshop.log(), before=partial(sit, rank)) for rank in range(PROCESSES)
    ]
