"""Whether several processes each hold the whole model or share it: as configured, or by the memory plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..distributed.world import World


@dataclass(frozen=True)
class Parallel:
    """kind: replicate, shard or hybrid; `nodes`: machines that each have the whole model, where the processes of one share it."""

    kind: str
    reason: str = ""
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind

    @property
    def shares(self) -> bool:
        return self.kind != "replicate"


REPLICATE = Parallel("replicate")


def choose_parallel(task, basis, world: World) -> Parallel:
    kind = task.config.parallel.kind
    if world.size == 1:
        return REPLICATE
    return Parallel("replicate" if kind == "auto" else kind, "parallel.kind")
