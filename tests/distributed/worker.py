"""One process of a test's run: `python -m tests.distributed.worker '{"config": FILE, ...}'`,
started by `processes` or torchrun.

config, resume  as for `isotype train`
fault           [rank, step, what]: at that step (0: at the samples before the first one) that
                process is killed (`die`), stops (`stop`), sleeps (`hang`), raises (`raise`), gets
                SIGINT (`interrupt`), cannot write files any more (`full`), or an element of its
                part of a weight is not a number (`weight`). `refuse`, at step 0: its preflight
                finds too small a disk
"""

import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from isotype.config.load import load
from isotype.errors import IsotypeError
from isotype.tasks.choose import choose_task
from isotype.training.run import train
from tests.api import Loop, local_part
from tests.api import loop as loop_module


def act(what: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        time.sleep(1000)
    elif what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    elif what == "full":
        os.fsync = refuse_to_write
    else:
        raise ValueError("a row that nobody expected")


def refuse_to_write(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_fault(rank: int, step: int, what: str) -> None:
    """Makes one process act at the beginning of a step, or at the samples before the first one."""
    if what == "refuse":
        if int(os.environ["RANK"]) == rank:
            shutil.disk_usage = lambda _: SimpleNamespace(free=0)
        return
    steps, samples, takes = Loop._step, Loop._sample, loop_module.load_local_batches
    at = (-1, -1)

    def one_step(loop, number):
        nonlocal at
        at = (loop.world.rank, number)
        if at == (rank, step) and what == "weight":
            local_part(loop.model.model.norm.weight).data[0] = math.nan
        steps(loop, number)

    def batches(task, stream, batching, **options):
        if at == (rank, step) and what != "weight":
            act(what)
        return takes(task, stream, batching, **options)

    def sample(loop):
        if (loop.world.rank, loop.progress.step) == (rank, step) == (rank, 0):
            act(what)
        return samples(loop)

    Loop._step, Loop._sample, loop_module.load_local_batches = one_step, sample, batches


def main() -> int:
    given = json.loads(sys.argv[1])
    if given.get("fault"):
        with_fault(*given["fault"])
    torch.set_num_threads(1)
    resume = Path(given["resume"]) if given.get("resume") else None
    loaded = load(
        resume / "resolved.yaml" if resume else given["config"], [], {}, resolved=resume is not None
    )
    try:
        return train(loaded, choose_task(loaded.config), resume=resume)
    except IsotypeError as error:
        if not error.is_shown_elsewhere:
            print(f"isotype: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
