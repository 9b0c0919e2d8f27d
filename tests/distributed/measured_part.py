"""One process, alone or of those that share a model, measured in its steps: `python -m tests.distributed.measured_part CONFIG RESULT`.

RESULT gets the planned peak and, by rank, the measured one, in bytes. The first of two steps is taken once before, and what it took is
given back, so that libraries, connections and caches of matrix products are not counted.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from isotype.config.load import load
from isotype.distributed.world import join
from isotype.tasks.choose import task_of
from isotype.training.memory.device import return_freed_blocks
from isotype.training.memory.distributed_plan import plan_part
from isotype.training.setup import prepare


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(file: str, result: str) -> None:
    torch.set_num_threads(1)
    assert return_freed_blocks()
    world = join("cpu", timeout=600)
    loaded = load(file, [], {})

    def steps(count):
        task = task_of(loaded.config)
        prepared = prepare(task, loaded.sources, Path(result).parent / "base", world)
        batch = task.collate(task.largest(prepared.batching.rows))
        prepared.model.train()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        for step in range(1, count + 1):
            prepared.stepper([batch] * len(prepared.batching.own), step=step, learning_rate=1e-4, watch_changes=False)
        return task, prepared

    kept = steps(1)
    del kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    task, prepared = steps(2)
    measured = world.gather(status("VmHWM") - before)
    if world.first:
        precision = prepared.resolved.precision
        plan = plan_part(
            task.outline(precision, device_type="cpu"), loaded.config.train, precision, task.step_outline(precision),
            checkpointing=prepared.checkpointing, device_type="cpu", parts=world.size,
        )  # fmt: skip
        Path(result).write_text(json.dumps({"planned": plan.as_json(), "measured": measured}))
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
