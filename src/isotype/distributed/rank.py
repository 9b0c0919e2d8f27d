"""Finds out which process of a run this is, from the environment variables that the launcher sets.
This module does not import torch.

`torchrun`, `accelerate launch` and `isotype train --processes N` set the same variables. The
variables are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. SLURM's
`srun` and MPI's `mpirun` set variables with other names. The variables of `srun` and `mpirun` do
not contain the address at which the processes can connect to each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..config.schema import TrainSection
from ..errors import UsageError

LAUNCHED_BY = "ISOTYPE_LAUNCHED_BY"  # environment variable that `isotype train --processes` sets
_TORCHRUN = "start with torchrun, which sets them all, or unset RANK and WORLD_SIZE"


@dataclass(frozen=True)
class _Scheduler:
    """Describes a program that starts processes: its name and the environment variables that it
    sets.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_SCHEDULERS = (
    _Scheduler("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    _Scheduler("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # MPICH and Intel MPI; srun sets these too, and is recognised before
    _Scheduler("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Describes the position of this process in the run. This process has the number `rank` among
    the `size` processes of the run, and the number `local_rank` among the `local_size` processes on
    this machine.

    launcher  the launcher's name, for messages
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = ""


def find_rank(environ: Mapping[str, str] = os.environ) -> Rank:
    """Reads the rank of this process from the environment.

    Raises  UsageError if the variables contradict each other, or if a scheduler started several
            tasks without a launcher
    """
    scheduler = _find_scheduler(environ)
    launcher = environ.get(LAUNCHED_BY, "")
    if "RANK" in environ or "WORLD_SIZE" in environ:
        rank = _read_number(environ, "RANK")
        size = _read_number(environ, "WORLD_SIZE")
        is_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
        launcher = launcher or ("accelerate" if is_accelerate else "torchrun")
    elif scheduler is not None:
        rank = _read_number(environ, scheduler.rank)
        size = _read_number(environ, scheduler.size)
        launcher = scheduler.name
    else:
        return Rank()
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK={rank} is not one of WORLD_SIZE={size} processes, counted from 0", fix=_TORCHRUN
        )
    if size == 1:
        return Rank()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if environ.get(name):
            continue
        if "RANK" in environ:
            message = f"WORLD_SIZE={size} processes, and {name} does not say where they meet"
            raise UsageError(message, fix=_TORCHRUN)
        raise _no_meeting_place_error(launcher, size, name)
    local_rank, local_size = _find_local_rank(environ, scheduler, rank)
    return Rank(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=launcher
    )


def _find_scheduler(environ: Mapping[str, str]) -> _Scheduler | None:
    """Returns the scheduler that started this process as one of several processes. Returns None if
    no scheduler started it.
    """
    for scheduler in _SCHEDULERS:
        size = environ.get(scheduler.size, "1")
        if scheduler.rank in environ and size.isdecimal() and int(size) > 1:
            return scheduler
    return None


def _find_local_rank(
    environ: Mapping[str, str], scheduler: _Scheduler | None, rank: int
) -> tuple[int, int]:
    """Returns the rank of this process among the processes on its machine, and the number of these
    processes.
    """
    is_of_scheduler = scheduler is not None and environ.get(scheduler.rank) == str(rank)
    if scheduler is None or "LOCAL_RANK" in environ or not is_of_scheduler:
        return _read_number(environ, "LOCAL_RANK", "0"), _read_number(
            environ, "LOCAL_WORLD_SIZE", "1"
        )
    local_rank = _read_number(environ, scheduler.local_rank, "0")
    local_sizes = _expand_counts(environ.get(scheduler.local_size, "1"))
    node = _read_number(environ, "SLURM_NODEID", "0")
    return local_rank, max(local_rank + 1, local_sizes[min(node, len(local_sizes) - 1)])


def is_first_of_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns True if no other process of this machine has a lower rank. Also returns True if
    `isotype train --processes` started the process, because this launcher shows the output of only
    one process.
    """
    if LAUNCHED_BY in environ:
        return True
    names = ("LOCAL_RANK", *(scheduler.local_rank for scheduler in _SCHEDULERS))
    return next((environ[name] for name in names if environ.get(name)), "0") == "0"


def _expand_counts(text: str) -> list[int]:
    """Parses SLURM's short form for the number of tasks on each node. For example, returns [4, 4,
    3] for `4(x2),3`.
    """
    counts: list[int] = []
    for match in re.finditer(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(match[1])] * int(match[2] or 1)
    return counts or [1]


def _no_meeting_place_error(launcher: str, size: int, name: str) -> UsageError:
    """Returns the error to raise if a scheduler started several processes that cannot find each
    other. If this error were not raised, each process would train separately.
    """
    return UsageError(
        f"{launcher} started {size} processes, and {name} does not say where they meet: each would"
        " be a separate run",
        fix=(
            "set MASTER_ADDR to the first machine and MASTER_PORT to a free port for all of them"
            " (on one machine: 127.0.0.1 and 29500), or start one process a machine, and in it:"
            " torchrun --nnodes MACHINES --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint"
            " FIRST_MACHINE:29500 -m isotype train ..."
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
    """Describes how the rows of a step are divided into micro-batches. The rows stay in the order
    of the data.

    micro_batch_size     number of rows of each micro-batch
    micro_batches        number of micro-batches of the step in all processes together
    local_micro_batches  the indices of this process's micro-batches
    """

    micro_batch_size: int
    micro_batches: int
    local_micro_batches: range

    @classmethod
    def plan_step(cls, train: TrainSection, *, rank: int = 0, size: int = 1) -> Batching:
        """Divides a step between the processes. Each process gets the same number of rows. If this
        number is divisible by `train.batch_size`, the micro-batches have `train.batch_size` rows;
        otherwise they are smaller.

        Raises  UsageError if `batch_size` x `accumulate` rows cannot be divided evenly; the message
                contains the nearest numbers of processes with which this is possible
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
    """Returns a text with the nearest numbers of processes below and above `size` that divide the
    rows of a step evenly. An example is `2 or 4 processes`.
    """
    divisors = [n for n in range(1, rows_per_step + 1) if rows_per_step % n == 0]
    below = max(n for n in divisors if n < size)
    above = min((n for n in divisors if n > size), default=None)
    if above is None:
        return f"{below} process" + ("es" if below > 1 else "")
    return f"{below} or {above} processes"
