"""Writes the result at the end of a run, which is an adapter or a model. Also writes adapters
during training.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..config.schema import RunConfig
from ..distributed.shard import Sharding, gather_tensors, replace_in_state_dict
from ..distributed.world import ALONE, World
from ..dtypes import to_torch
from ..model.export import trained_tensors
from ..model.initialisation import to_ordinary_adapter
from ..precision.precision import Precision
from ..precision.resolution import Resolved
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.folder import RunFolder
from ..runs.record import PrecisionRecord
from .task import Task


def result_dtype(config: RunConfig, precision: Precision) -> str:
    """The dtype in which the adapter or the model is saved."""
    if config.adapter.kind == "none":
        return precision.save_model
    return precision.save_adapter


@dataclass(frozen=True)
class ResultWriter:
    """Writes the adapter or the model with the current weights.

    resolved  the precision of the run, with the reason for each dtype
    world     the processes of the run
    sharding  how the processes share the model; None if each has the whole model
    record    the dtypes that were recorded during training, for the model card
    """

    task: Task
    model: nn.Module
    resolved: Resolved
    world: World
    sharding: Sharding | None
    record: PrecisionRecord

    @property
    def dtype(self) -> str:
        return result_dtype(self.task.config, self.resolved.precision)

    def write(self, target: Path, *, step: int) -> dict[str, Tensor]:
        """Writes the result. In the first process, returns the trained tensors. Processes that
        share the model call this method together.
        """
        sharding = self.sharding
        if sharding is None:
            tensors = to_ordinary_adapter(self.model, trained_tensors(self.model))
            gathered = {}
            model_world = ALONE
        else:
            tensors = gather_tensors(self.model, self.world, sharding, to_torch(self.dtype))
            gathered = tensors
            model_world = self.world

        def fill(folder: Path) -> None:
            with replace_in_state_dict(self.model, gathered):
                self.task.save(self.model, folder, self.resolved.precision, step=step)
            (folder / "precision.json").write_text(self.resolved.to_json())
            self.task.write_card(
                self.model,
                folder,
                self.resolved.precision,
                step=step,
                observed=self.record.observed,
            )

        model_world.run_on_first(lambda: write_folder(target, fill), without_timeout=True)
        return tensors

    def write_adapter(self, folder: RunFolder, *, step: int) -> None:
        """Writes the adapter to `adapters/step_N`. If the folder `adapters` then contains more than
        `run.adapters_keep` adapters, the oldest adapters are removed.
        """
        target = folder.adapters / f"step_{step}"

        def write() -> None:
            self.write(target, step=step)

        if self.sharding is None:
            self.world.run_on_first(write, without_timeout=True)
        else:
            write()
        kept_count = self.task.config.run.adapters_keep
        if self.world.is_first and kept_count is not None:
            for old_step in folder.adapter_steps()[:-kept_count]:
                shutil.rmtree(folder.adapters / f"step_{old_step}")
