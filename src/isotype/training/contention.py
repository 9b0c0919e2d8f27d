"""Detects other programs on this machine's cores, and measures whether fewer threads would be faster.

At the end of each parallel loop all threads wait for the slowest one, whose core another program may be using, and they spend CPU time
while they wait: a job that took 10 CPU seconds with one thread took 49 with one thread per core. The commands let threads sleep instead
where cores are shared when they start (`environment.waiting`); a program that has loaded torch itself is advised. Isotype does not change
the number of threads itself, since it determines the order of sums, and a resumed run would no longer be bit-identical.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

BUSY = 1.25  # other work on the cores, as a share of them, from which on threads are compared
GAIN = 1.15  # fewer threads are advised where they are faster by this
_ROUNDS = 5
_ENOUGH = 1.0  # seconds of measuring after which no further round is begun
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Measurements on shared cores. `seconds`: number of threads -> wall seconds of a fixed piece of work; `cpu_seconds`: its CPU time."""

    load: float
    cores: float
    threads: int
    seconds: dict[int, float]
    cpu_seconds: dict[int, float]
    passive: bool = False
    """Threads sleep while they wait for each other (OMP_WAIT_POLICY)."""

    @property
    def best(self) -> int:
        """The number of threads to use: the present one, unless fewer are clearly faster."""
        fastest = min(self.seconds, key=lambda n: self.seconds[n])
        return fastest if self.seconds[fastest] * GAIN < self.seconds[self.threads] else self.threads

    def __str__(self) -> str:
        said = f"shared: a load of {self.load:.1f} on {self.cores:g} cores; times and ETA will vary"
        if self.best == self.threads:
            return said
        wall = self.seconds[self.threads] / self.seconds[self.best]
        cpu = self.cpu_seconds[self.threads] / max(self.cpu_seconds[self.best], 1e-9)
        few = "1 thread is" if self.best == 1 else f"{self.best} threads are"
        return (
            f"{said}; {few} {wall:.1f} times as fast as {self.threads}, for 1/{cpu:.1f} of the processor time: OMP_NUM_THREADS={self.best}"
            + ("" if self.passive else ", or OMP_WAIT_POLICY=PASSIVE, which changes no result")
        )


def contention(
    load: Callable[[], float] | None = None,
    measure: Callable[[int], tuple[float, float]] | None = None,
) -> Contention | None:
    """The measurements, or None on a machine without other work.

    load     processes that want to run, as os.getloadavg's first number
    measure  wall and processor seconds of a fixed piece of work, by number of threads
    """
    load, measure = load or _load, measure or _measured
    cores, threads = available_cores(), torch.get_num_threads()
    busy = load()
    if busy < BUSY * cores and threads <= cores:
        return None
    counts = sorted({1, max(1, threads // 2), threads})
    rounds: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
    for _ in range(_ROUNDS if threads > 1 else 1):
        for n in counts:
            rounds[n].append(measure(n))
        if sum(wall for found in rounds.values() for wall, _ in found) > _ENOUGH:
            break
    return Contention(
        load=busy, cores=cores, threads=threads,
        seconds={n: fmean(wall for wall, _ in found) for n, found in rounds.items()},
        cpu_seconds={n: fmean(cpu for _, cpu in found) for n, found in rounds.items()},
        passive=os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE",
    )  # fmt: skip


def available_cores() -> float:
    """The number of cores this process may use: those of its affinity mask, or its container's share of them."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return allowed if quota == "max" else min(allowed, int(quota) / int(period))
    except (OSError, ValueError):
        return allowed


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _measured(threads: int) -> tuple[float, float]:
    """Times work like a training step, products with elementwise operations, for longer than one scheduler time slice."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.full((256, 256), 1 / 256)
        w = torch.full((256, 256), 1 / 256)
        torch.relu(x @ w)  # starts the threads
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(60):
            x = torch.relu(x @ w + x)
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        torch.set_num_threads(before)
