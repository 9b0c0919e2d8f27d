"""One process of a run that reads its model, measured: `python -m tests.distributed.measured_loading TINY_CONFIG CONFIG RESULT`.

The tiny run is prepared first, so that libraries are not counted, and malloc returns what is freed. RESULT gets, by rank, the anonymous
memory in bytes that reading the model took at most, and in the end. Mapped pages of files are not counted: the system drops them where
memory is short.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed.fsdp

from isotype.config.load import load
from isotype.distributed.world import join
from isotype.tasks.choose import task_of
from isotype.training.memory.device import return_freed_blocks
from isotype.training.setup import prepare


def anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def main(tiny: str, file: str, result: str) -> None:
    torch.set_num_threads(1)
    assert return_freed_blocks()
    world = join("cpu", timeout=600)
    first = load(tiny, [], {})
    prepare(task_of(first.config), first.sources, Path(result).parent / "tiny", world)
    gc.collect()
    loaded = load(file, [], {})
    task, taken = task_of(loaded.config), []

    def measured(work):
        def does(*args, **kwargs):
            taken.append(anonymous())
            made = work(*args, **kwargs)
            taken.append(anonymous())
            return made

        return does

    task.build_model = measured(task.build_model)
    torch.distributed.fsdp.fully_shard = measured(torch.distributed.fsdp.fully_shard)
    prepare(task, loaded.sources, Path(result).parent / "base", world)
    before = taken[0]
    found = world.gather([max(taken) - before, taken[-1] - before])
    if world.first:
        Path(result).write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
