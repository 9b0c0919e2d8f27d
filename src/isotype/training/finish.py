"""The end of a run: save the adapter or the model, load it again, compare, write the result."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from ..dtypes import to_torch
from ..model.saved_form import digests, trained_tensors
from ..runs.checkpoint.atomic_folder import write_folder
from ..runs.checkpoint.snapshot import restore_model
from .loop import Loop
from .setup import Prepared
from .verify import ROWS, verify_result


def finish(loop: Loop, prepared: Prepared) -> dict[str, Any]:
    """Returns the content of result.json. Raises RunError SV001 when the saved result is not the trained one.

    The first process saves and checks; the others wait, for as long as it lives.
    """
    loop.world.at(loop.progress.step, "the result")
    if not loop.world.first:
        _free(loop, prepared)
    return loop.world.first_does(lambda: _finish(loop, prepared), patiently=True)


def _finish(loop: Loop, prepared: Prepared) -> dict[str, Any]:
    config, progress, precision, task = loop.config, loop.progress, prepared.resolved.precision, loop.task
    taken = _take_best(loop) if config.train.patience else progress.step
    adapter = config.adapter.kind != "none"
    target = loop.folder.path / ("adapter" if adapter else "model")

    def fill(folder: Path) -> None:
        task.save(loop.model, folder, precision)

    write_folder(target, fill)
    loop.observe_saved(target, precision.save_adapter if adapter else precision.save_model)
    trained = task.evaluate(loop.model, loop.device, dtype=precision.loss, most=ROWS)
    weights = digests(trained_tensors(loop.model), to_torch(precision.save_adapter if adapter else precision.save_model))
    _free(loop, prepared)
    reloaded = verify_result(task, target, precision, prepared.device, trained=trained, weights=weights, adapter=adapter)
    return {
        "status": "done",
        "folder": str(loop.folder.path),
        "adapter" if adapter else "model": str(target),
        "base": task.base_name if adapter else None,
        "steps": progress.step,
        "of_step": taken,
        "best_eval_loss": progress.best_loss if task.eval_rows else None,
        "best_step": progress.best_step,
        task.words.units: progress.units,
        "trained_seconds": round(progress.trained_seconds, 2),
        "check": {
            "rows": min(ROWS, task.eval_rows or task.rows),
            "trained_loss": trained.loss,
            "reloaded_loss": reloaded.loss,
        },
    }


def _take_best(loop: Loop) -> int:
    """With early stopping the best weights are the result; returns their step."""
    best = loop.store.best
    if best is not None and best != loop.progress.step:
        if (reason := loop.store.fault(best)) is not None:
            loop.console.say(f"warning   the best checkpoint, step_{best}, is damaged ({reason}): the result is the last step's weights")
            return loop.progress.step
        restore_model(loop.model, loop.store.load(best).tensors)
        loop.console.say(f"taking the weights of step {best}, the best evaluation")
        return best
    return loop.progress.step


def _free(loop: Loop, prepared: Prepared) -> None:
    """Frees the trained model, so that the memory suffices for the reloaded one."""
    loop.stepper.accumulator.close()
    loop.observer = loop.stepper = loop.model = None  # type: ignore[assignment]  # nothing reads them again
    prepared.stepper = prepared.model = None  # type: ignore[assignment]  # nor these
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
