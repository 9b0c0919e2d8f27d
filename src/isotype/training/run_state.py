"""Contains the state of a run between two steps. A checkpoint stores this state and restores it bit
for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    PROCESS_COUNT,
    Progress,
    local_tensors,
    optimizer_tensors,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
    trainable_tensors,
)
from ..runs.checkpoint.store import Checkpoint, CheckpointStore
from .optimizer import Ema, convert_states, group_counters
from .step import LossScale, Stepper
from .task import Feed

UNNAMED_OPTIMIZER = "adamw"  # the optimizer of a checkpoint that names none


@dataclass
class RunState:
    """The parts of a run that change from step to step.

    ema              the moving average of the weights; None if the run has none
    stream           yields the training rows, and has a position that is saved
    world            the processes of the run; they save and restore its state together
    precision        the name that the run's precision has in its checkpoints
    precision_roles  maps each key of the run's precision to its dtype
    """

    model: nn.Module
    stepper: Stepper
    ema: Ema | None
    stream: Feed[Any]
    world: World
    device: torch.device
    precision: str
    precision_roles: Mapping[str, Any]
    progress: Progress = field(default_factory=Progress)

    def take_checkpoint(self) -> Checkpoint:
        """Returns the current state. If processes share the model, returns this process's part of
        the state.
        """
        stepper = self.stepper
        random_tensors, random_json = random_state()
        optimizer, optimizer_numbers = optimizer_tensors(self.model, stepper.optimizer)
        share_changed = None if stepper.share_changed is None else float(stepper.share_changed)
        loss_scale = None if stepper.loss_scale is None else asdict(stepper.loss_scale)
        state = {
            "progress": asdict(self.progress),
            "share_changed": share_changed,
            "stream": self.stream.state(),
            "random": random_json,
            PROCESS_COUNT: self.world.size,
            "optimizer": optimizer_numbers,
            "optimizer_is": stepper.train.optimizer,
            "optimizer_groups": group_counters(stepper.optimizer),
            "loss_scale": loss_scale,
            "precision": self.precision,
            "precision_roles": self.precision_roles,
        }
        averages = {} if self.ema is None else self.ema.tensors()
        tensors = {**trainable_tensors(self.model), **optimizer, **averages, **random_tensors}
        if stepper.sharding is not None:
            tensors = local_tensors(tensors, is_first=self.world.is_first)
        return Checkpoint(self.progress.step, tensors, state)

    def write_checkpoint(
        self, store: CheckpointStore, checkpoint: Checkpoint, *, is_best: bool
    ) -> None:
        """Writes the checkpoint. If the processes share the model, each process writes its own
        part. Otherwise the first process writes the whole checkpoint. Raises RunError CK001 if the
        checkpoint cannot be written to the disk.
        """
        sharding = self.stepper.sharding
        if sharding is None:
            self.world.run_on_first(lambda: store.save(checkpoint, is_best=is_best))
        else:
            store.save_together(
                checkpoint,
                self.world,
                file_index=self.world.rank,
                file_count=sharding.shard_count,
                is_best=is_best,
            )

    def restore_weights(self, checkpoint: Checkpoint) -> None:
        """Restores the trained weights and their averages."""
        restore_model(self.model, checkpoint.tensors)
        if self.ema is not None:
            self.ema.restore(checkpoint.tensors)

    def has_optimizer_states(self, checkpoint: Checkpoint) -> bool:
        """Returns True if the checkpoint has the states of this run's optimizer."""
        name = checkpoint.state.get("optimizer_is", UNNAMED_OPTIMIZER)
        return bool(name == self.stepper.train.optimizer)

    def has_same_precision(self, checkpoint: Checkpoint) -> bool:
        """Returns True if the checkpoint was written with the same precision as this run."""
        state = checkpoint.state
        roles = state.get("precision_roles")
        if roles is not None:
            return bool(roles == self.precision_roles)
        # a checkpoint without roles: its preset bf16-pure had gradients and states in fp32
        name = str(state.get("precision"))
        return name == self.precision and not name.startswith("bf16-pure")

    def restore_training(self, checkpoint: Checkpoint) -> int:
        """Restores everything that a checkpoint contains, except the weights and their averages.
        Returns the number of processes that wrote the checkpoint.
        """
        stepper = self.stepper
        state = checkpoint.state
        if self.has_optimizer_states(checkpoint):
            restore_optimizer(self.model, stepper.optimizer, checkpoint.tensors, state["optimizer"])
            convert_states(stepper.optimizer, state.get("optimizer_groups", []))
        if self.world.size == 1:  # several processes are seeded at each step
            restore_random_state(checkpoint.tensors, state["random"])
        processes = int(state.get(PROCESS_COUNT, 1))
        self.progress = Progress.from_file(state["progress"])
        self.stream.restore(state["stream"])
        if (changed := state.get("share_changed")) is not None:
            stepper.share_changed = torch.tensor(float(changed), device=self.device)
        if stepper.loss_scale and state["loss_scale"]:
            scale = float(state["loss_scale"]["scale"])
            stepper.loss_scale = LossScale(scale, int(state["loss_scale"]["quiet"]))
        return processes


def compare_loaded_state(continuity: Continuity, checkpoint: Checkpoint) -> Observation:
    """Compares the loaded weights, optimizer states and averages with those of the checkpoint, in
    value and dtype. Raises DtypeError DT003.
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


# kind of a tensor -> the beginning of its name in a checkpoint
_CHECKPOINT_PREFIX = {WEIGHT: "model", STATE: "optimizer", AVERAGE: "ema", BUFFER: "buffer"}


def checkpoint_key(key: Key) -> str:
    """Returns the name that a tensor has in a checkpoint. `key` is the name that the class
    `Continuity` uses for this tensor.
    """
    kind, *path = key
    return ".".join((_CHECKPOINT_PREFIX[kind], *path))


def last_good_checkpoint(store: CheckpointStore) -> str:
    """Returns a text for error messages. The text names the checkpoint from which the run can be
    resumed.
    """
    step, _ = store.find_newest_intact()
    if step is None:
        return "there is no checkpoint yet"
    return f"last good checkpoint: {store.path(step)}"
