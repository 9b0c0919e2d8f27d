"""Reads from the launcher's environment variables which process of a run this is. Imports no torch.

`torchrun`, `accelerate launch` and `isotype train --processes N` set the same variables: RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.schema import TrainSection
from ..errors import UsageError

LAUNCHED_BY = "ISOTYPE_LAUNCHED_BY"
_TORCHRUN = "start with torchrun, which sets them all, or unset RANK and WORLD_SIZE"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The position of this process: it is number `rank` of `size` processes of the run, and number
    `local_rank` of `local_size` processes on this machine.

    launcher  the launcher's name, for messages
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""


def find_rank(environ: Mapping[str, str] = os.environ) -> Rank:
    """Reads the rank of this process from the environment.

    Raises  UsageError for variables that contradict each other, and for tasks that a scheduler
            started without a launcher
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        _refuse_tasks_without_launcher(environ)
        return Rank()
    rank = _read_number(environ, "RANK")
    size = _read_number(environ, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} is not one of WORLD_SIZE={size} processes, counted from 0", fix=_TORCHRUN
        )
    if size == 1:
        return Rank()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise UsageError(
                f"WORLD_SIZE={size} processes, and {name} does not say where they meet",
                fix=_TORCHRUN,
            )
    local_rank = _read_number(environ, "LOCAL_RANK", "0")
    local_size = _read_number(environ, "LOCAL_WORLD_SIZE", "1")
    launcher = environ.get(LAUNCHED_BY) or (
        "accelerate" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"
    )
    return Rank(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=launcher
    )


def _refuse_tasks_without_launcher(environ: Mapping[str, str]) -> None:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks.isdigit() and int(tasks) > 1:
        raise UsageError(
            f"SLURM started {tasks} tasks, and each would be a separate run",
            fix=(
                "one task a node, and in it: torchrun --nnodes $SLURM_NNODES --nproc-per-node GPUS"
                " --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 -m isotype train ..."
            ),
        )


def _read_number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        if text:
            message = f"{name}={text!r} is not a number"
        else:
            message = f"{name} is not set, and others of a launcher's variables are"
        raise UsageError(message, fix=_TORCHRUN) from None


@dataclass(frozen=True)
class Batching:
    """How the rows of a step are divided into micro-batches, in the order of the data.

    micro_batch_size     rows of each micro-batch
    micro_batches        micro-batches of the step, over all processes
    local_micro_batches  the indices of this process's micro-batches
    """

    micro_batch_size: int
    micro_batches: int
    local_micro_batches: range

    @classmethod
    def plan_step(cls, train: TrainSection, *, rank: int = 0, size: int = 1) -> Batching:
        """Divides a step between the processes. Each process gets whole micro-batches of
        `train.batch_size` rows if their number allows it, else smaller micro-batches.

        Raises  UsageError where `batch_size` x `accumulate` rows cannot be divided evenly; the
                message names the nearest numbers of processes that can
        """
        rows_per_step = train.batch_size * train.accumulate
        if rows_per_step % size:
            raise UsageError(
                f"{size} processes cannot share {rows_per_step} rows a step evenly (train.batch_size"
                f" {train.batch_size} x train.accumulate {train.accumulate})",
                fix=(
                    f"{_name_nearest_process_counts(rows_per_step, size)} can; or another train.accumulate, which is another"
                    " step"
                ),
            )
        rows_per_process = rows_per_step // size
        rows = next(
            n
            for n in range(min(train.batch_size, rows_per_process), 0, -1)
            if rows_per_process % n == 0
        )
        local_count = rows_per_process // rows
        return cls(rows, rows_per_step // rows, range(rank * local_count, (rank + 1) * local_count))


def _name_nearest_process_counts(rows_per_step: int, size: int) -> str:
    """Names the nearest numbers of processes below and above `size` that divide the rows of a step
    evenly: `2 or 4 processes`.
    """
    divisors = [n for n in range(1, rows_per_step + 1) if rows_per_step % n == 0]
    below = max(n for n in divisors if n < size)
    above = min((n for n in divisors if n > size), default=None)
    if above is None:
        return f"{below} process" + ("es" if below > 1 else "")
    return f"{below} or {above} processes"
