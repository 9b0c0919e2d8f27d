"""Estimates how long the parts of a run take: its steps, evaluations, samples, and the check of its
result.

The header of a run uses the measured time of a trial step. `isotype plan` runs no model. On a CPU,
it measures for about 0.2 s how fast this machine multiplies matrices and reads weights, and
computes the times from the FLOPs of the longest rows, the lengths of all rows, and the bytes of the
weights. There is no
such estimate for a GPU. On a GPU, launching the kernels takes most of the time of a small step or
of one generated token, and this time cannot be computed from FLOPs and bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..dtypes import to_torch
from ..precision.precision import Precision
from .console import format_duration
from .memory.recomputation import Checkpointing
from .schedule import RunSchedule
from .task import ModelOutline, StepOutline, Task, evaluation_batch_size

# a step takes 1.17 to 1.31 times as long as its matrix products
STEP_OVERHEAD = 1.3
# a generated token takes 1.4 times as long as reading the weights
TOKEN_OVERHEAD = 1.4
MEASURED_SECONDS = 0.1  # duration of one measurement


def part_seconds(
    task: Task, schedule: RunSchedule, batch_seconds: float, sample_seconds: float
) -> dict[str, float]:
    """Returns the seconds of each part of a run. The time of a batch is assumed to be proportional
    to its size.

    batch_seconds   the time of a forward and a backward of the largest micro-batch
    sample_seconds  the time of one round of samples
    """
    train = task.config.train
    sizes = task.mean_sizes
    # a forward takes at most half of the time of forward and backward
    forward_seconds = batch_seconds / 2
    evaluated_rows = schedule.evaluations * schedule.evaluated_rows
    if schedule.eval_stride > 1:
        evaluated_rows += schedule.eval_rows
    return {
        "steps": schedule.total * train.accumulate * batch_seconds * sizes.training,
        "evaluation": (
            evaluated_rows / evaluation_batch_size(train) * forward_seconds * sizes.evaluation
        ),
        "samples": schedule.sample_rounds * sample_seconds,
        # one row before the result is loaded again, and one after that
        "check at the end": 2 * forward_seconds,
    }


def format_parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {format_duration(value)}" for name, value in parts.items() if value)


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """The estimated time of a run that has not begun.

    parts             the seconds of each part
    flops_per_second  the measured speed of matrix products in the compute dtype
    has_samples       False if the run generates samples whose time is unknown
    """

    parts: dict[str, float]
    flops_per_second: float
    has_samples: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": {name: float(f"{value:.3g}") for name, value in self.parts.items()},
            "flops_per_second": self.flops_per_second,
            "includes_samples": self.has_samples,
        }

    def __str__(self) -> str:
        without = "" if self.has_samples else " without samples"
        return (
            f"about {format_duration(sum(self.parts.values()))}{without}, estimated:"
            f" {format_parts(self.parts)}; from the FLOPs of the rows and"
            f" {self.flops_per_second / 1e9:.0f} GFLOP/s, measured on this machine now"
        )


def estimate_time(
    task: Task,
    model_outline: ModelOutline,
    step_outline: StepOutline,
    schedule: RunSchedule,
    precision: Precision,
    checkpointing: Checkpointing,
) -> TimeEstimate | None:
    """Estimates the time of a run on the CPU of this machine. Returns None if the FLOPs of the model
    are unknown.
    """
    model = model_outline.model
    block_flops = step_outline.block_flops(model)
    if not block_flops:
        return None
    dtype = to_torch(precision.compute)
    speed = measure_flops_per_second(dtype)
    recomputed = sum(block_flops[i] for i in checkpointing.layers if i < len(block_flops))
    forward = sum(block_flops) + step_outline.head_flops(model)
    batch_seconds = (2 * forward + recomputed) / speed * STEP_OVERHEAD
    rounds = task.sample_forwards
    sample_seconds = 0.0
    if rounds and not precision.packed:
        weight_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
        sample_seconds = rounds * weight_bytes / measure_bytes_per_second(dtype) * TOKEN_OVERHEAD
    return TimeEstimate(
        parts=part_seconds(task, schedule, batch_seconds, sample_seconds),
        flops_per_second=speed,
        has_samples=bool(sample_seconds) or not task.samples or not schedule.sample_rounds,
    )


def measure_flops_per_second(dtype: torch.dtype) -> float:
    """Measures the speed of a matrix product of 512 rows with a weight of 1024 x 1024."""
    from ..ops.widened_products import linear

    x = torch.ones(512, 1024, dtype=dtype)
    weight = torch.ones(1024, 1024, dtype=dtype)
    return 2 * x.numel() * 1024 / _fastest(lambda: linear(x, weight))


def measure_bytes_per_second(dtype: torch.dtype) -> float:
    """Measures how many bytes of a weight per second a matrix product with a single row reads. The
    weight has 64 MiB, so it does not fit into the caches of most processors.
    """
    from ..lora.attach import linear_for_few_rows

    features = 4096
    columns = (64 << 20) // (features * dtype.itemsize)
    with torch.device("cpu"), torch.no_grad():
        layer = nn.Linear(features, columns, bias=False, dtype=dtype, device="meta").to_empty(
            device="cpu"
        )
        layer.weight.fill_(1.0)
        x = torch.ones(1, features, dtype=dtype)
        return (64 << 20) / _fastest(lambda: linear_for_few_rows(layer, x))


def _fastest(action: Callable[[], object]) -> float:
    """Calls the function again and again for MEASURED_SECONDS, and returns the time of the fastest
    call in seconds. The first call is not counted.
    """
    action()
    end = time.perf_counter() + MEASURED_SECONDS
    fastest = float("inf")
    while fastest == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
