"""One process of a test's run: `python -m tests.distributed.worker '{"config": FILE, ...}'`, started by `processes` or torchrun.

config, resume  as for `isotype train`
command         arguments of `isotype`, which is then run instead
toy             the toy task instead of the language task
group           the process group is there before the run
fault           [rank, step, what]: at that step that process is killed (`die`), stops (`stop`), sleeps (`hang`) or raises (`raise`)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed

from isotype.config.load import load
from isotype.errors import IsotypeError
from isotype.training.loop import Loop
from isotype.training.run import train


def act(what: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        time.sleep(1000)
    elif what == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        raise ValueError("a row that nobody expected")


def with_fault(rank: int, step: int, what: str) -> None:
    """Makes one process act at the beginning of a step."""
    takes = Loop._own_rows

    def own_rows(loop):
        if (loop.world.rank, loop.progress.step + 1) == (rank, step):
            act(what)
        return takes(loop)

    Loop._own_rows = own_rows


def main() -> int:
    given = json.loads(sys.argv[1])
    if given.get("fault") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with_fault(*given["fault"])
    if given.get("command"):
        from isotype.cli.app import main as command

        sys.argv = ["isotype", *given["command"]]
        command()
    torch.set_num_threads(1)
    resume = Path(given["resume"]) if given.get("resume") else None
    loaded = load(resume / "resolved.yaml" if resume else given["config"], [], {}, resolved=resume is not None)
    if given.get("toy"):
        from tests.training.toy_task import ToyTask

        task = ToyTask(loaded.config)
    else:
        from isotype.tasks.choose import task_of

        task = task_of(loaded.config)
    if given.get("group"):
        torch.distributed.init_process_group("gloo")  # as Ray Train does before it calls the training function
    try:
        return train(loaded, task, resume=resume)
    except IsotypeError as error:
        if not error.shown_elsewhere:
            print(f"isotype: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
