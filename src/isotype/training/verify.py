"""Verifies the result of a run: the saved weights, loaded into a fresh base, must give the loss of the trained model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..distributed.shard import Sharding, keep_own_part, part_of
from ..distributed.world import ALONE, World
from ..dtypes import eps, to_torch
from ..errors import RunError
from ..model.export import Digests, refuse_difference
from ..precision.precision import Precision
from .task import Evaluation, Task
from .undisturbed import same_draws

ROWS = 16  # enough that a wrong adapter cannot hide, few enough for a CPU


def saved_dtype_error(precision: Precision, *, adapter: bool) -> float:
    """The allowed relative change of the loss: that of rounding to the saved dtype; 1e-6 if the weights were trained in this dtype."""
    saved = precision.save_adapter if adapter else precision.save_model
    return 1e-6 if saved in ("fp32", precision.trainable) else eps(saved)


def verify_result(
    task: Task, folder: Path, precision: Precision, device: torch.device, *, trained: Evaluation, weights: Digests, adapter: bool,
    world: World = ALONE, sharding: Sharding | None = None,
) -> Evaluation:  # fmt: skip
    """Returns the loss of the reloaded result. Raises RunError SV001 when this loss or one of the trained `weights` differs.

    sharding  how the trained model was distributed over the processes of `world`, which all call this: the reloaded one is too
    """
    mesh = None if sharding is None else sharding.mesh

    def compare(model: nn.Module) -> None:
        if world.first:
            refuse_difference(folder, weights, model, to_torch(precision.save_adapter if adapter else precision.save_model))

    def load() -> tuple[nn.Module, list[nn.Module]]:
        if mesh is None:
            model = task.reload(folder, precision, device)
            compare(model)
            return model, []
        part = part_of(mesh, look=compare)
        model = task.reload(folder, precision, device, part)
        return model, keep_own_part(model, mesh, part, reduce=precision.reduce)

    model, units = world.in_turn(load)
    if sharding is not None:
        Sharding(model, units, world, mesh=mesh, replicas=sharding.replicas)
    with same_draws():
        reloaded = task.evaluate(model, device, dtype=precision.loss, most=ROWS, world=world)
    allowed = saved_dtype_error(precision, adapter=adapter) * max(1.0, abs(trained.loss))
    if not abs(reloaded.loss - trained.loss) <= allowed:
        raise RunError(
            f"{folder} was saved, but loaded into a fresh base its loss is {reloaded.loss:.6f} where training had {trained.loss:.6f}",
            code="SV001", fix="the checkpoints are untouched; report this with env.json",
        )  # fmt: skip
    return reloaded
