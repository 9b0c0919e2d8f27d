"""The state of a run between two steps: a checkpoint is taken of it, and restores it bit for bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ..distributed.world import World
from ..observe import Observation
from ..observe.continuity import (
    AVERAGE,
    BUFFER,
    STATE,
    WEIGHT,
    Continuity,
    Key,
    report_differences,
    report_narrow_values,
)
from ..runs.checkpoint.snapshot import (
    Progress,
    gather_random_state,
    local_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    restore_rank_random_state,
    trainable_tensors,
)
from ..runs.checkpoint.store import Checkpoint, CheckpointStore
from .optimizer import Ema, convert_states, group_counters
from .step import LossScale, Stepper
from .task import Feed

UNNAMED_OPTIMIZER = "adamw"  # of checkpoints that do not name theirs


@dataclass
class RunState:
    """What changes from step to step.

    stream     the position in the training rows
    world      the processes of the run, which take and restore its state together
    precision  of the run, as its checkpoints name it
    """

    model: nn.Module
    stepper: Stepper
    ema: Ema | None
    stream: Feed[Any]
    world: World
    device: torch.device
    precision: str
    progress: Progress = field(default_factory=Progress)

    def take_checkpoint(self) -> Checkpoint:
        """The state as it is now; of a shared model the part of this process."""
        stepper = self.stepper
        random_tensors, random_json = gather_random_state(self.world)
        optimizer, optimizer_numbers = optimizer_tensors(self.model, stepper.optimizer)
        share_changed = None if stepper.share_changed is None else float(stepper.share_changed)
        loss_scale = None if stepper.loss_scale is None else asdict(stepper.loss_scale)
        state = {
            "progress": asdict(self.progress),
            "share_changed": share_changed,
            "stream": self.stream.state(),
            **random_json,
            "optimizer": optimizer_numbers,
            "optimizer_is": stepper.train.optimizer,
            "optimizer_groups": group_counters(stepper.optimizer),
            "loss_scale": loss_scale,
            "precision": self.precision,
        }
        averages = {} if self.ema is None else self.ema.tensors()
        tensors = {**trainable_tensors(self.model), **optimizer, **averages, **random_tensors}
        if stepper.sharding is not None:
            tensors = local_tensors(tensors, is_first=self.world.first)
        return Checkpoint(self.progress.step, tensors, state)

    def write_checkpoint(
        self, store: CheckpointStore, checkpoint: Checkpoint, *, is_best: bool
    ) -> None:
        """The first process writes it, or each process that shares the model its part. Raises
        RunError CK001 when the disk refuses.
        """
        sharding = self.stepper.sharding
        if sharding is None:
            self.world.first_does(lambda: store.save(checkpoint, best=is_best))
        else:
            store.save_together(
                checkpoint, self.world, part=self.world.rank, parts=sharding.parts, best=is_best
            )

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """Restores trained weights and their averages."""
        restore_model(self.model, checkpoint.tensors)
        if self.ema is not None:
            self.ema.restore(checkpoint.tensors)

    def has_optimizer_states(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has the states of this run's optimizer."""
        name = checkpoint.state.get("optimizer_is", UNNAMED_OPTIMIZER)
        return bool(name == self.stepper.train.optimizer)

    def restore_training(self, checkpoint: Checkpoint) -> int:
        """Restores everything else; returns how many processes wrote the checkpoint."""
        stepper = self.stepper
        state = checkpoint.state
        if self.has_optimizer_states(checkpoint):
            restore_optimizer(self.model, stepper.optimizer, checkpoint.tensors, state["optimizer"])
            convert_states(stepper.optimizer, state.get("optimizer_groups", []))
        processes = restore_rank_random_state(
            checkpoint.tensors,
            state,
            self.world.rank,
            seed=(stepper.train.seed, checkpoint.step),
        )
        self.progress = Progress.from_file(state["progress"])
        self.stream.restore(state["stream"])
        if (changed := state.get("share_changed")) is not None:
            stepper.share_changed = torch.tensor(float(changed), device=self.device)
        if stepper.loss_scale and state["loss_scale"]:
            scale = float(state["loss_scale"]["scale"])
            stepper.loss_scale = LossScale(scale, int(state["loss_scale"]["quiet"]))
        return processes


def compare_loaded_state(continuity: Continuity, checkpoint: Checkpoint) -> Observation:
    """Compares the loaded weights, states and averages with the file's, their dtypes included.
    Raises DtypeError DT003.
    """
    observation = Observation(checkpoint.step)
    differences = continuity.compare_tensors(
        lambda key: checkpoint.tensors.get(checkpoint_key(key))
    )
    report_differences(observation, differences, "the save", "the load", strict=True)
    if checkpoint.step > 1:
        report_narrow_values(
            observation,
            continuity.find_narrow_loads(),
            f"after the load of step {checkpoint.step}",
        )
    return observation


_CHECKPOINT_PREFIX = {WEIGHT: "model", STATE: "optimizer", AVERAGE: "ema", BUFFER: "buffer"}


def checkpoint_key(key: Key) -> str:
    """The name in a checkpoint of a tensor that `Continuity` samples under this key."""
    kind, *path = key
    return ".".join((_CHECKPOINT_PREFIX[kind], *path))


def last_good_checkpoint(store: CheckpointStore) -> str:
    """The checkpoint from which a run can be resumed, for an error."""
    step, _ = store.find_newest_intact()
    if step is None:
        return "there is no checkpoint yet"
    return f"last good checkpoint: {store.path(step)}"
