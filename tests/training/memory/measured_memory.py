"""Run as a program: prints the memory that the first two steps of a real run took, as JSON.

One such step is taken before, and what it took is given back, so that code pages, compiled kernels and the caches of matrix products
(15 to 40 MB) are not counted. Freed blocks go back, as in a run whose memory is near.
"""

import ctypes
import gc
import json
import sys
from functools import partial

import torch


def status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(architecture: dict, settings: list[str], length: int) -> None:
    from isotype.training.memory.device import return_freed_blocks

    assert return_freed_blocks()
    kept = steps(architecture, settings, length, count=1)
    del kept
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    kept = steps(architecture, settings, length, count=2)
    print(json.dumps({"peak": status("VmHWM") - before}))
    del kept


def steps(architecture: dict, settings: list[str], length: int, *, count: int) -> object:
    """`count` optimizer steps; the peak is counted from the first of them, since building a model may take more than training it."""
    stepper, batches = built(architecture, settings, length)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    for step in range(1, count + 1):
        stepper(batches, step=step, learning_rate=1e-4, watch_changes=False)
    return stepper


def built(architecture: dict, settings: list[str], length: int) -> tuple:
    """A real model's stepper, and the batches of a step."""
    from tests.models import quantised
    from transformers import AutoConfig, AutoModelForCausalLM

    from isotype.config.load import load
    from isotype.dtypes import to_torch
    from isotype.model.adapter import attach_adapter
    from isotype.optimize import optimize
    from isotype.precision.accumulate import GradientAccumulator
    from isotype.precision.apply import apply_precision
    from isotype.precision.precision import Precision
    from isotype.tasks.language.batches import Batch
    from isotype.tasks.language.objective import batch_loss_sum
    from isotype.training.memory.recomputation import apply_checkpointing, as_configured
    from isotype.training.optimizer import build_optimizer
    from isotype.training.step import Stepper

    config = load(None, settings).config
    precision = Precision.preset(config.precision.preset)
    every_weight = config.adapter.kind == "none"
    dtype = precision.trainable if every_weight else precision.unquantised
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture), dtype=to_torch(dtype), attn_implementation="sdpa")
    base.config.use_cache = False
    if precision.base == "nf4":
        quantised(base, compute=to_torch(precision.compute))
    model = base if every_weight else attach_adapter(base, config.adapter, seed=0)
    if config.model.optimize:
        optimize(model, precision)
    if config.train.gradient_checkpointing != "auto":
        apply_checkpointing(model, as_configured(model, config.train))
    apply_precision(model, precision, device_type="cpu")
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads, reduce=precision.reduce)
    stepper = Stepper(
        model,
        build_optimizer(model, config.train, precision, accumulator.gradient),
        accumulator,
        precision,
        config.train,
        partial(batch_loss_sum, dtype=precision.loss),
    )
    rows = config.train.batch_size
    ids_BT = torch.randint(3, 90, (rows, length))
    if config.data.packing:
        positions_BT = torch.arange(length).remainder(128).expand(rows, -1)
        batch = Batch(ids_BT, None, ids_BT, rows * length, rows * (length - 1), positions_BT)
    else:
        batch = Batch(ids_BT, torch.ones_like(ids_BT), ids_BT, rows * length, rows * (length - 1))
    model.train()
    return stepper, [batch] * config.train.accumulate


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
