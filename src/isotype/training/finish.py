"""Ends a run. This module saves the adapter or the model, loads it again, compares it with the
trained weights, and writes result.json.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.schema import RunConfig
from ..distributed.shard import Sharding, keep_part, local_part_of_mesh
from ..distributed.world import ALONE, World
from ..dtypes import eps, to_torch
from ..errors import RunError
from ..model.export import Digests, digest_tensors, refuse_difference
from ..model.initialisation import SUBTRACTED_STARTS
from ..observe import Observation
from ..optimize.fp32_layers import use_stored_fp32_layers
from ..precision.precision import Precision
from ..runs.checkpoint.snapshot import local_row_selector, restore_model, restore_optimizer
from ..runs.metrics import read_last_value
from ..wording import pluralise
from .console import RunConsole, format_duration
from .loop import Loop
from .optimizer import FOLDER_SUFFIX, SCHEDULE_FREE, use_averages
from .setup import Prepared
from .task import Evaluation, Task, fix_random_state


def finish(loop: Loop, prepared: Prepared) -> dict[str, Any]:
    """Saves the result, loads it again and compares it with the trained weights. Returns the
    content of result.json. Raises RunError SV001 if the loaded result differs from the trained
    weights.

    The first process does this while the other processes wait. If the processes share the model,
    all of them save, load and compare it together, because no single process could hold the whole
    model.
    """
    loop.world.record_progress(loop.progress.step, "the result")
    if prepared.sharding is not None:
        with loop.world.explain_exchange_errors():
            return _save_and_verify(loop, prepared, loop.world)
    if not loop.world.is_first:
        _free_model(loop, prepared)
    return loop.world.run_on_first(
        lambda: _save_and_verify(loop, prepared, ALONE), without_timeout=True
    )


@dataclass(frozen=True)
class _SavedResult:
    """A saved result, with the loss and the hashes of the tensors that it must have after it is
    loaded again.

    dtype       the dtype of the saved weights
    evaluation  the loss before saving
    """

    folder: Path
    dtype: torch.dtype
    evaluation: Evaluation
    weight_digests: Digests


def _save_and_verify(loop: Loop, prepared: Prepared, world: World) -> dict[str, Any]:
    """Saves the result, frees the model, loads the result again and compares it. Returns the
    content of result.json.

    world  the processes that call this together
    """
    config = loop.config
    progress = loop.progress
    precision = prepared.resolved.precision
    task = loop.task
    result_step = _load_best_weights(loop, world) if saves_best(config) else progress.step
    kind = "model" if config.adapter.kind == "none" else "adapter"
    with use_averages(loop.stepper.optimizer):
        saved_results = [_save_result(loop, loop.folder.path / kind, world)]
    if loop.ema is not None:
        with loop.ema.use_averages():
            saved_results.append(
                _save_result(loop, loop.folder.path / f"{kind}{FOLDER_SUFFIX}", world)
            )
    _free_model(loop, prepared)
    reloaded_evaluations = [
        _verify_result(task, saved_result, precision, prepared.device, world, prepared.sharding)
        for saved_result in saved_results
    ]
    result: dict[str, Any] = {
        "status": "done",
        "folder": str(loop.folder.path),
        kind: str(saved_results[0].folder),
        "base": task.base_name if kind == "adapter" else None,
        "steps": progress.step,
        "of_step": result_step,
        # a resume with other evaluation rows chooses the best anew, and the losses on the earlier
        # rows are not those of this result
        "eval_loss": (
            _evaluation_loss(loop, result_step) if math.isfinite(progress.best_loss) else None
        ),
        "whole_eval_loss": _whole_evaluation_loss(loop, result_step),
        "eval_set": _describe_eval_set(loop),
        "best_eval_loss": (
            progress.best_loss if task.eval_rows and math.isfinite(progress.best_loss) else None
        ),
        "best_step": progress.best_step,
        task.metric_names.units: progress.units,
        "trained_seconds": round(progress.trained_seconds, 2),
        "check": {
            "rows": min(_checked_row_count(config, precision), task.eval_rows or task.rows),
            "trained_loss": saved_results[0].evaluation.loss,
            "reloaded_loss": reloaded_evaluations[0].loss,
            "tensors": len(saved_results[0].weight_digests),
        },
    }
    if len(saved_results) > 1:
        losses = {
            "averaged_loss": saved_results[1].evaluation.loss,
            "reloaded_loss": reloaded_evaluations[1].loss,
        }
        result[f"{kind}{FOLDER_SUFFIX}"] = {"folder": str(saved_results[1].folder), **losses}
    return result


def saves_best(config: RunConfig) -> bool:
    """Returns True if the result contains the weights of the step with the best evaluation, and not
    those of the last step.
    """
    if config.run.save is None:
        return config.train.patience is not None
    return config.run.save == "best"


def evaluation_set(config: RunConfig) -> str:
    """Returns the name of the evaluation rows that decide which step is the best. The last lines of
    a run show this name.
    """
    if config.train.stop_on is not None:
        return config.train.stop_on
    section = config.data if config.images.train is None else config.images
    if section.eval is None:
        if section is config.data:
            return "held-out rows"
        return "held-out clips" if config.images.frames > 1 else "held-out pictures"
    if isinstance(section.eval, dict):
        return f"all sets: {', '.join(section.eval)}"
    sources = section.eval if isinstance(section.eval, list) else [section.eval]
    names = [
        Path(source["name"] if isinstance(source, dict) else source).name for source in sources
    ]
    return ", ".join(names)


def _describe_eval_set(loop: Loop) -> str:
    """Returns a text about the evaluation rows that decide which step is the best. The text
    contains the name of the evaluation set. If only a part of the set is used, the text also says
    which part.
    """
    name = evaluation_set(loop.config)
    schedule = loop.schedule
    if schedule.eval_stride == 1:
        return name
    return f"{name}, one of {schedule.eval_stride}"


def _evaluation_loss(loop: Loop, step: int) -> float | None:
    """Returns the evaluation loss of the weights after `step`. This loss is computed on the
    evaluation rows that decide which step is the best.
    """
    stop_metric = loop.config.train.stop_on
    return _evaluation_metric(
        loop, step, "eval_loss" if stop_metric is None else f"eval_loss_{stop_metric}"
    )


def _whole_evaluation_loss(loop: Loop, step: int) -> float | None:
    """Returns the loss on all evaluation rows. A run computes it only if its regular evaluations
    use a part of the rows, and only after the last step.
    """
    return _evaluation_metric(loop, step, "whole_eval_loss")


def _evaluation_metric(loop: Loop, step: int, key: str) -> float | None:
    if not loop.task.eval_rows or not loop.folder.metrics.is_file():
        return None
    value: float | None = read_last_value(loop.folder.metrics, step, key)
    return value


def _save_result(loop: Loop, target: Path, world: World) -> _SavedResult:
    """Writes the model's current weights to `target`, and records which dtypes the written files
    contain. The hashes of the weights are returned only in the first process. Raises DtypeError
    DT003.
    """
    writer = loop.result_writer
    tensors = writer.write(target, step=loop.progress.step)
    if world.is_first:
        observation = Observation(loop.progress.step)
        loop.observer.observe_files(observation, target, writer.dtype)
        loop.precision_record.add(observation)
    dtype = to_torch(writer.dtype)
    precision = loop.resolved.precision
    weight_digests = digest_tensors(tensors, dtype)
    _round_weights(loop.model, dtype)
    with fix_random_state():
        evaluation = loop.task.evaluate(
            loop.model,
            loop.device,
            dtype=precision.loss,
            most=_checked_row_count(loop.config, precision),
            world=world,
        )
    return _SavedResult(target, dtype, evaluation, weight_digests)


def _round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the trained weights to the dtype of the file. After this, the trained model has the
    same loss on a single row as the result that is loaded from the file. The weights are not
    trained any more after they are rounded.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and p.is_floating_point() and p.element_size() > dtype.itemsize:
                p.copy_(p.to(dtype))


def _load_best_weights(loop: Loop, world: World) -> int:
    """Loads the weights with the best evaluation into the model. Returns their step."""
    best_step: int | None = world.run_on_first(lambda: loop.store.best)
    if best_step is None or best_step == loop.progress.step:
        return loop.progress.step
    if reason := loop.store.find_damage(best_step, world):
        loop.console.print_line(
            f"warning   the best checkpoint, step_{best_step}, is damaged ({reason}): the result is the"
            " last step's weights"
        )
        return loop.progress.step
    checkpoint = loop.store.load(best_step, local_row_selector(loop.model), is_verified=True)
    restore_model(loop.model, checkpoint.tensors)
    # the averages of a schedule-free optimizer are computed from its states
    if loop.config.train.optimizer == SCHEDULE_FREE:
        restore_optimizer(
            loop.model, loop.stepper.optimizer, checkpoint.tensors, checkpoint.state["optimizer"]
        )
    if loop.ema is not None:
        loop.ema.restore(checkpoint.tensors)
    loop.console.print_line(f"taking the weights of step {best_step}, the best evaluation")
    return best_step


def _free_model(loop: Loop, prepared: Prepared) -> None:
    """Frees the trained model, so that there is enough memory to load the saved model."""
    loop.stepper.accumulator.close()
    loop.mapped_files.close()
    # nothing reads these attributes again
    for name in ("observer", "stepper", "model", "ema", "continuity", "frozen_weights"):
        setattr(loop, name, None)
    for name in ("state", "result_writer"):
        setattr(loop, name, None)
    for name in ("stepper", "model"):
        setattr(prepared, name, None)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_base_rounded(config: RunConfig, precision: Precision) -> bool:
    """Returns True if the base weights were rounded during training. `adapter.start` subtracts the
    adapter from the base weights, and rounds the difference to their dtype.
    """
    adapter = config.adapter
    return (
        adapter.kind != "none" and adapter.start in SUBTRACTED_STARTS and precision.base != "fp32"
    )


# number of rows over which the noise of a rounded base is averaged
_ROWS_WITH_ROUNDED_BASE = 16


def _checked_row_count(config: RunConfig, precision: Precision) -> int:
    """Returns the number of rows whose loss is compared. The tensors are compared bit for bit. So
    the loss of one row is enough to show whether the loaded model has the same base model, the same
    adapter scale and the same precision as in training. If the base weights were rounded, several
    rows are used, because their mean loss is less noisy.
    """
    return _ROWS_WITH_ROUNDED_BASE if _is_base_rounded(config, precision) else 1


def _verify_result(
    task: Task,
    saved: _SavedResult,
    precision: Precision,
    device: torch.device,
    world: World,
    sharding: Sharding | None,
) -> Evaluation:
    """Loads the result again and returns its loss. Raises RunError SV001 if this loss or one of the
    trained weights differs.

    sharding  how the processes of `world` share the trained model. The processes share the reloaded
              model in the same way, so all processes call this function together
    """
    mesh = None if sharding is None else sharding.mesh

    def compare(model: nn.Module) -> None:
        if world.is_first:
            refuse_difference(saved.folder, saved.weight_digests, model, saved.dtype)

    def load() -> tuple[nn.Module, list[nn.Module]]:
        part = None if mesh is None else local_part_of_mesh(mesh, on_loaded=compare)
        model = task.reload(saved.folder, precision, device, part)
        if part is None:
            compare(model)
            use_stored_fp32_layers(model, saved.folder.parent)
        return model, [] if part is None else keep_part(model, mesh, part, reduce=precision.reduce)

    model, units = world.run_sequentially(load)
    if sharding is not None:
        Sharding(model, units, world, mesh=mesh, replica_count=sharding.replica_count)
    with fix_random_state():
        reloaded_evaluation = task.evaluate(
            model,
            device,
            dtype=precision.loss,
            most=_checked_row_count(task.config, precision),
            world=world,
        )
    # the tolerance is the error of rounding to the saved dtype. If the base was rounded in training,
    # the error of rounding the base is added
    is_exact = saved.dtype in (torch.float32, to_torch(precision.trainable))
    tolerance = 1e-6 if is_exact else torch.finfo(saved.dtype).eps
    if _is_base_rounded(task.config, precision):
        tolerance = max(eps(precision.base), torch.finfo(saved.dtype).eps)
    trained_loss = saved.evaluation.loss
    if not abs(reloaded_evaluation.loss - trained_loss) <= tolerance * max(1.0, abs(trained_loss)):
        raise RunError(
            f"{saved.folder} was saved, but loaded into a fresh base its loss is"
            f" {reloaded_evaluation.loss:.6f} where training had {trained_loss:.6f}",
            code="SV001",
            fix="the checkpoints are untouched; report this with env.json",
        )
    return reloaded_evaluation


def print_result(result: dict[str, Any], console: RunConsole, *, has_eval_rows: bool) -> None:
    path = result.get("adapter") or result.get("model")
    console.print_line()
    best_loss = result["best_eval_loss"]
    step = result["best_step"]
    eval_set = result["eval_set"]
    # the best loss on the current evaluation rows; before a resume the run may have had other rows
    if best_loss is None:
        evaluation_text = ""
    elif step:
        evaluation_text = f", best evaluation loss {best_loss:.4f} ({eval_set}) at step {step}"
    else:
        # a run that was cut short may not have been evaluated after a step
        best = "" if result["eval_loss"] is None else "best "
        evaluation_text = f", {best}evaluation loss {best_loss:.4f} ({eval_set}) before step 1"
    console.print_line(
        f"done      {pluralise(result['steps'], 'step')} in"
        f" {format_duration(result['trained_seconds'])}{evaluation_text}"
    )
    console.print_line(f"saved     {path}: {saved_weights(result)}")
    check = result["check"]
    losses = f"loss {check['reloaded_loss']:.4f}, trained {check['trained_loss']:.4f}"
    equal_text = f"{pluralise(check['tensors'], 'tensor')} equal"
    rows = "evaluation row" if has_eval_rows else "training row"
    console.print_line(
        f"checked   loaded into a fresh base: {losses}, on {pluralise(check['rows'], rows)}; {equal_text}"
    )


def saved_weights(result: dict[str, Any]) -> str:
    """Returns a text with the step of the saved weights and their loss on the evaluation rows."""
    step = result["of_step"]
    best_step = result["best_step"]
    loss = result["eval_loss"]
    if step != result["steps"]:
        description = "the best evaluation"
    elif step == best_step:
        description = "the last and best"
    else:
        description = "the last"
    text = f"the weights of step {step}, {description}"
    if loss is not None:
        whole_loss = result.get("whole_eval_loss")
        all_rows = "" if whole_loss is None else f", {whole_loss:.4f} on all rows"
        text += f" (evaluation loss {loss:.4f}{all_rows})"
    if best_step and step != best_step:
        text += f"; run.save: best takes step {best_step}"
    return text
