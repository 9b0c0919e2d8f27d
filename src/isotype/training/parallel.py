"""Whether several processes each hold the whole model or share it: as configured, or by the memory plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.kind import wants_embedding_on_host
from ..config.schema import RunConfig
from ..distributed.world import World
from ..errors import UsageError
from .memory.auto_recomputation import WITHIN
from .memory.device import shown

if TYPE_CHECKING:
    from collections.abc import Callable

AUTO, REPLICATE, SHARD, HYBRID = "auto", "replicate", "shard", "hybrid"


@dataclass(frozen=True)
class Parallel:
    """kind: replicate, shard or hybrid; `nodes`: machines that each have the whole model, where the processes of one share it."""

    kind: str
    reason: str = ""
    nodes: int = 1

    @property
    def shares(self) -> bool:
        return self.kind != REPLICATE

    def parts(self, size: int) -> int:
        """How many of `size` processes share a model."""
        return size // self.nodes if self.shares else 1

    def __str__(self) -> str:
        return f"{self.kind} ({self.reason})" if self.reason else self.kind


ALONE = Parallel(REPLICATE)


def as_configured(config: RunConfig, world: World) -> Parallel | None:
    """What the configuration says, or None where it leaves that to the plan.

    Raises  UsageError for a kind that this run or this number of machines cannot have
    """
    kind = config.parallel.kind
    if world.size == 1:
        return ALONE
    if kind in (AUTO, REPLICATE):
        return None if kind == AUTO else Parallel(REPLICATE, "parallel.kind")
    if why := why_not_shared(config):
        raise UsageError(f"parallel.kind: {kind} with {why}", fix="leave that away, or parallel.kind: replicate")
    if kind == SHARD:
        return Parallel(SHARD, "parallel.kind")
    if world.nodes == 1 or world.nodes == world.size or world.size % world.nodes:
        why = "one machine" if world.nodes == 1 else f"{world.nodes} machines with {world.size} processes"
        raise UsageError(
            f"parallel.kind: hybrid shares the model between the processes of each of several machines, and this run has {why}",
            fix="parallel.kind: shard",
        )
    return Parallel(HYBRID, "parallel.kind", world.nodes)


def why_not_shared(config: RunConfig) -> str | None:
    """The setting with which a model cannot be shared, and why; or None."""
    train = config.train
    if train.optimizer == "adamw8bit":
        return "train.optimizer: adamw8bit: its states have a scale every 256 elements of a whole weight"
    if train.ema is not None:
        return "train.ema: averages of shared weights are not offered yet"
    if wants_embedding_on_host(config):
        return "model.embedding: host: rows are looked up in a weight that a process has whole"
    return None


def by_plan(most: int, has: int, peak: Callable[[], int], *, config: RunConfig) -> Parallel:
    """What `auto` takes: the whole model in each process where it fits, since a step then exchanges least.

    most  an upper bound of a process's bytes
    peak  the planned bytes, asked for only where the bound is near what the device `has`
    """
    if not has:
        return Parallel(REPLICATE, "auto: the device's memory is unknown")
    if most <= has // 2:
        return Parallel(REPLICATE, f"auto: a process cannot take more than {shown(most)} of {shown(has)}")
    needs = peak()
    if needs <= has * (1 - WITHIN):
        return Parallel(REPLICATE, f"auto: a process takes {shown(needs)} of {shown(has)}")
    why = f"auto: the whole model would take {shown(needs)} of {shown(has)}"
    if cannot := why_not_shared(config):
        return Parallel(REPLICATE, f"{why}, and is not shared because of {cannot}")
    return Parallel(SHARD, why)
