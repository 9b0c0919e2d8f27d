"""Plans a run on many GPUs without having them: the memory of a process and the bytes that a step exchanges, for each way to share the
work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..distributed.passes import Passes
from ..errors import UsageError
from . import exchange
from .exchange import Exchange
from .memory.device import shown
from .memory.distributed_plan import unit_bytes
from .memory.plan import MemoryPlan
from .memory.recomputation import Checkpointing
from .parallel import HYBRID, REPLICATE, SHARD, Parallel, by_plan
from .setup import Basis, planned_checkpointing
from .task import Outline, Task

OF_A_MACHINE = 8  # GPUs


@dataclass(frozen=True)
class KindPlan:
    """One way to share the work. `memory` and `exchange` are of one process and one step."""

    kind: str
    memory: MemoryPlan
    checkpointing: Checkpointing
    exchange: Exchange


@dataclass(frozen=True)
class ProcessesPlan:
    """processes  one a GPU;  nodes  machines;  passes  of each process in a step, of `rows` rows;  taken  what `auto` takes"""

    processes: int
    nodes: int
    passes: int
    rows: int
    kinds: Sequence[KindPlan]
    taken: Parallel

    def as_json(self) -> dict[str, Any]:
        return {
            "processes": self.processes,
            "machines": self.nodes,
            "passes": self.passes,
            "rows": self.rows,
            "kinds": {
                one.kind: {"memory": one.memory.as_json(), "checkpointing": one.checkpointing.as_settings(), **asdict(one.exchange)}
                for one in self.kinds
            },
            "auto": {"kind": self.taken.kind, "reason": self.taken.reason},
        }

    def lines(self) -> list[str]:
        where = "one machine" if self.nodes == 1 else f"{self.nodes} machines of {self.processes // self.nodes}"
        lines = [
            f"processes   {self.processes} on {where}, each {self.passes} x {self.rows} rows of each step: {self.taken}",
            f"  {'kind':<11}{'memory a process':>18}{'sent a process':>18}{'out of a machine':>18}   recomputed",
        ]
        for one in self.kinds:
            sizes = (one.memory.peak, one.exchange.sent, one.exchange.between)
            lines.append(f"  {one.kind:<11}" + "".join(f"{shown(size):>18}" for size in sizes) + f"   {one.checkpointing.kind}")
        return lines


def passes_of(task: Task, processes: int) -> Passes:
    """Raises  UsageError for a number of processes that cannot share a step, or that fills no whole machines"""
    if processes > OF_A_MACHINE and processes % OF_A_MACHINE:
        raise UsageError(
            f"--gpus {processes}: machines of {OF_A_MACHINE} are planned for, and the last one would not be full",
            fix=f"--gpus {processes // OF_A_MACHINE * OF_A_MACHINE} or {(processes // OF_A_MACHINE + 1) * OF_A_MACHINE}",
        )
    return Passes.of(task.config.train, size=processes)


def plan_processes(
    task: Task, basis: Basis, made: Outline, passes: Passes, processes: int, *, whole: tuple[Checkpointing, MemoryPlan]
) -> ProcessesPlan:
    """task its configuration has `passes.rows` as `train.batch_size`
    whole  the plan of a process that has the whole model
    """
    precision, has = basis.resolved.precision, basis.hardware.memory
    nodes, n = max(1, processes // OF_A_MACHINE), len(passes.own)
    whole_units, units = unit_bytes(made.model, 1), unit_bytes(made.model, processes)
    exchanges = {
        REPLICATE: exchange.replicated(whole_units, precision, processes=processes, nodes=nodes),
        SHARD: exchange.sharded(units, precision, processes=processes, nodes=nodes, passes=n),
    }
    if nodes > 1:
        units = unit_bytes(made.model, processes // nodes)
        exchanges[HYBRID] = exchange.hybrid(units, precision, processes=processes, nodes=nodes, passes=n)
    kinds = []
    for kind, bytes_ in exchanges.items():
        parts = Parallel(kind, nodes=nodes if kind == HYBRID else 1).parts(processes)
        shared = parts > 1
        checkpointing, memory = planned_checkpointing(task, basis, made, has=has, besides=0, parts=parts) if shared else whole
        kinds.append(KindPlan(kind, memory, checkpointing, bytes_))
    peak, config = whole[1].peak, task.config
    taken = by_plan(peak, has, lambda: peak, config=config)
    if config.parallel.kind != "auto":
        taken = Parallel(config.parallel.kind, "parallel.kind")
    return ProcessesPlan(processes, nodes, n, passes.rows, kinds, taken)
