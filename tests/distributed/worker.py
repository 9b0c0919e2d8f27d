"""One process of a test's run: `python -m tests.distributed.worker '{"config": FILE, ...}'`, started by `processes` or torchrun.

config, resume  as for `isotype train`
command         arguments of `isotype`, which is then run instead
toy             the toy task instead of the language task
group           the process group is there before the run
counted         prints the bytes that the last step sent
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


def with_counted_bytes() -> None:
    """Prints at each step what its collectives sent, by ring algorithms: the sizes are those of the tensors that they were given."""
    sent, takes = [0.0], Loop._step

    def counting(name: str, place: int, times: int) -> None:
        collective = getattr(torch.distributed, name)

        def call(*args, **kwargs):
            tensor = args[place] if len(args) > place else kwargs["input_tensor" if place else "output_tensor"]
            size = torch.distributed.get_world_size(kwargs.get("group"))
            sent[0] += times * tensor.numel() * tensor.element_size() * (size - 1) / size
            return collective(*args, **kwargs)

        setattr(torch.distributed, name, call)

    counting("all_reduce", 0, 2)
    counting("all_gather_into_tensor", 0, 1)
    counting("reduce_scatter_tensor", 1, 1)

    def step(loop, number):
        sent[0] = 0.0
        takes(loop, number)
        if loop.world.first:
            print(f"step {number} sent {int(sent[0])} bytes")

    Loop._step = step


def main() -> int:
    given = json.loads(sys.argv[1])
    if given.get("counted"):
        with_counted_bytes()
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
