"""The memory of one process, alone or of those that share a model: `python -m
tests.distributed.measured loading|steps CONFIG RESULT TINY`.

A first, small run is taken before and given back, so that libraries, connections and caches of
matrix products are not counted; malloc returns what is freed. RESULT gets, by rank:

loading  the anonymous memory in bytes that reading the model took at most, and in the end (TINY is
         the first run's configuration). Mapped pages of files are not counted: the system drops
         them where memory is short
steps    the planned peak of two steps and the measured ones
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed.fsdp

from isotype.config.load import load
from isotype.distributed.world import World, join
from isotype.tasks.choose import choose_task
from isotype.training.memory.plan import plan_process_memory
from tests.api import prepare, return_freed_blocks


def kilobytes(file: str, key: str) -> int:
    """The bytes of a line of /proc/self/FILE."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def loading(world: World, file: str, folder: Path, tiny: str) -> object:
    first = load(tiny, [], {})
    prepare(choose_task(first.config), first.sources, folder / "tiny", world)
    gc.collect()
    loaded = load(file, [], {})
    task, taken = choose_task(loaded.config), []

    def measured(work):
        def does(*args, **kwargs):
            taken.append(kilobytes("smaps_rollup", "Anonymous:"))
            made = work(*args, **kwargs)
            taken.append(kilobytes("smaps_rollup", "Anonymous:"))
            return made

        return does

    task.build_model = measured(task.build_model)
    torch.distributed.fsdp.fully_shard = measured(torch.distributed.fsdp.fully_shard)
    prepare(task, loaded.sources, folder / "base", world)
    return world.gather([max(taken) - taken[0], taken[-1] - taken[0]])


def steps(world: World, file: str, folder: Path) -> object:
    loaded = load(file, [], {})

    def trained(count):
        task = choose_task(loaded.config)
        prepared = prepare(task, loaded.sources, folder / "base", world)
        batch = task.collate(task.largest_rows(prepared.batching.micro_batch_size))
        prepared.model.train()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        for step in range(1, count + 1):
            prepared.stepper(
                [batch] * len(prepared.batching.local_micro_batches),
                step=step,
                learning_rate=1e-4,
                watch_changes=False,
            )
        return task, prepared

    kept = trained(1)
    del kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = kilobytes("status", "VmRSS")
    task, prepared = trained(2)
    measured = world.gather(kilobytes("status", "VmHWM") - before)
    precision = prepared.resolved.precision
    plan = plan_process_memory(
        task.outline_model(precision, device_type="cpu"), loaded.config.train, precision, task.outline_largest_step(precision),
        checkpointing=prepared.checkpointing, device_type="cpu", parts=world.size,
    )  # fmt: skip
    return {"planned": plan.to_dict(), "measured": measured}


if __name__ == "__main__":
    what, config, result, *more = sys.argv[1:]
    torch.set_num_threads(1)
    assert return_freed_blocks()
    processes = join("cpu", timeout=600)
    found = {"loading": loading, "steps": steps}[what](
        processes, config, Path(result).parent, *more
    )
    if processes.is_first:
        Path(result).write_text(json.dumps(found))
    processes.close()
