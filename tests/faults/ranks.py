"""A run on two processes, of which one is killed, or both: at any moment, and right before any file operation of the one that saves.

The process that is left must name the one that is gone, in one message, and end with status 1; then the run goes on with two processes, and
must end byte for byte as the undisturbed run on two processes. They replicate the model, or share it
(then each writes a part of a checkpoint).
"""

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .child import HANGS, HUNG, Child, Ended
from .kills import die
from .operations import before_operation, operations_of
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
        recipe, how = list(RECIPES)[number % len(RECIPES)], HOWS[(number + number // len(RECIPES)) % len(HOWS)]
        kind = KINDS[(number + number // (2 * len(RECIPES))) % len(KINDS)]
        shared = {"parallel": {"kind": kind, "timeout": TIMEOUT}}
        if (recipe, kind) not in undisturbed:
            folder = workshop.new_folder()
            begun = time.monotonic()
            ended = Together(workshop, ["train", str(workshop.settings(folder, recipe, **shared))]).wait()
            if any(one.status for one in ended):
                yield Trial(part="ranks", what="undisturbed", survived=False, identical=None, wrong=ended[0].output[-1500:])
                return
            undisturbed[recipe, kind] = folder, time.monotonic() - begun
        yield _one(workshop, recipe, how, moments, shared, *undisturbed[recipe, kind])


def _one(
    workshop: Workshop, recipe: str, how: str, moments: random.Random, shared: dict[str, dict[str, Any]], undisturbed: Path, seconds: float
) -> Trial:
    folder = workshop.new_folder()
    settings = workshop.settings(folder, recipe, **shared)
    killed = (1,) if how.startswith("the other") else (0, 1) if how.startswith("both") else (0,)
    before = before_operation(moments.randint(1, operations_of(workshop, recipe)), die) if how.endswith("operation") else None
    run = Together(workshop, workshop.go_on(folder, settings), before=before)
    ended = run.wait(killed=() if before else killed, after=moments.uniform(0.1, seconds))
    wrong = [] if all(one.status == 0 for one in ended) else _wrong(ended, killed)
    message = next((line for one in ended for line in one.output.splitlines() if "MP00" in line), "")
    again = Together(workshop, workshop.go_on(folder, settings)).wait()
    survived = not wrong and all(one.status == 0 for one in again)
    if not all(one.status == 0 for one in again):
        wrong.append(f"did not go on: {' '.join(str(one.status) for one in again)}: {again[0].output[-1500:]}")
    else:
        wrong += differences(folder, undisturbed)
    if not wrong:
        shutil.rmtree(folder)
    what = f"{shared['parallel']['kind']}: SIGKILL of {how}"
    return Trial(part="ranks", what=what, survived=survived, identical=not wrong, message=message,
                 wrong="; ".join(wrong) + (f" ({folder}, {recipe})" if wrong else ""))  # fmt: skip


def _wrong(ended: Sequence[Ended], killed: Sequence[int]) -> list[str]:
    """What was not as it should be about the end of a run that a kill met."""
    found = [f"rank {rank} hung" for rank, one in enumerate(ended) if one.status == HUNG]
    left = [(rank, one) for rank, one in enumerate(ended) if rank not in killed and one.status not in (0, -signal.SIGKILL)]
    for rank, one in left:
        if one.status != 1:
            found.append(f"rank {rank} ended with {one.status}: {one.output[-500:]}")
        if "Traceback" in one.output:
            found.append(f"rank {rank} shows a traceback: {one.output[-1500:]}")
        if not any(f"rank {gone}" in one.error for gone in killed):
            found.append(f"rank {rank} does not name rank {killed[0]}: {one.output[-500:]}")
    return found


@dataclass
class Together:
    """A command as several processes of one run, started by nobody: their variables are set here."""

    workshop: Workshop
    arguments: Sequence[str]
    before: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def seated(rank: int) -> Callable[[], None]:
            def sit() -> None:
                of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in of_rank.items()} | {"MASTER_ADDR": "127.0.0.1"})
                if rank == 0 and self.before is not None:
                    self.before()

            return sit

        self.children = [Child(self.arguments, self.workshop.log(), before=seated(rank)) for rank in range(PROCESSES)]

    def wait(self, *, killed: Sequence[int] = (), after: float = 0.0) -> list[Ended]:
        """Waits for all; `killed` are killed `after` seconds from now."""
        begun, statuses = time.monotonic(), dict[int, int]()
        while len(statuses) < PROCESSES:
            since = time.monotonic() - begun
            for rank, child in enumerate(self.children):
                if rank in statuses:
                    continue
                if (status := child.poll()) is not None:
                    statuses[rank] = status
                elif since > HANGS:
                    child.kill()
                    os.waitpid(child.pid, 0)
                    statuses[rank] = HUNG
                elif rank in killed and since >= after:
                    child.kill()
            time.sleep(0.002)
        return [Ended(statuses[rank], child.log.read_text(errors="replace"), 0.0) for rank, child in enumerate(self.children)]
