"""A diffusion run's folder, loaded as it was trained: to draw pictures with it, or to evaluate it on other pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config.load import load
from ...config.schema import RunConfig
from ...environment.hardware import detect
from ...errors import UsageError
from ...model.run_precision import resolve_precision
from ...runs.checkpoint.atomic_folder import fault
from ...runs.checkpoint.snapshot import restore_model
from ...runs.checkpoint.store import CheckpointStore
from ...runs.folder import RESOLVED, RunFolder, require_run
from ...training.task import Evaluation
from .sample import Sample
from .task import EMPTY, DiffusionTask


def draw_with(folder: Path, prompts: Sequence[str], *, seed: int | None = None) -> tuple[str, list[Sample]]:
    """Which weights were taken (`adapter`, `model`, `checkpoint step_N`), and a picture for each prompt; the run's own prompts by default.

    Raises  UsageError when there are no prompts, or the run has neither a result nor a checkpoint yet
    """
    asked = list(prompts)

    def encode(task: DiffusionTask, device: torch.device) -> None:
        asked.extend([] if asked else task.config.run.samples)
        if not asked:
            raise UsageError(
                f"{folder}: the run has no prompts of its own (run.samples)", fix=f'isotype sample {folder} "a picture of ..."'
            )
        task.encoder = task.new_encoder(device)
        task.text = task.encoder.captions(list(dict.fromkeys([EMPTY, *asked])))

    task, model, device, taken = _loaded(folder, encode)
    how = task.drawing()
    return taken, task.draw(model, device, asked, how if seed is None else replace(how, seed=seed))


def evaluate_with(folder: Path, pictures: str, *, batch_size: int | None = None) -> tuple[str, Evaluation]:
    """Which weights were taken, and the loss on all pictures that `pictures` names, at fixed noise levels and by part of them.

    Raises  UsageError as a run on these pictures would, and when the run has neither a result nor a checkpoint yet
    """
    images = {"train": pictures, "eval": None, "eval_split": 0.0, "regularisation": None, "masks": None, "columns": None, "limit": None}

    def on_these(config: RunConfig) -> RunConfig:
        train = {"eval_batch_size": batch_size or config.train.eval_batch_size}
        sections = {"images": config.images.model_copy(update=images), "train": config.train.model_copy(update=train)}
        return config.model_copy(update=sections)

    def encode(task: DiffusionTask, device: torch.device) -> None:
        task.load_data()
        task.encode(device)

    task, model, device, taken = _loaded(folder, encode, on_these)
    return taken, task.evaluate(model, device, dtype=task.precision.loss)


def _loaded(
    folder: Path, encode: Callable[[DiffusionTask, torch.device], None], change: Callable[[RunConfig], RunConfig] = lambda config: config
) -> tuple[DiffusionTask, Any, torch.device, str]:
    """The task, the model in evaluation mode, the device, and which weights were taken. `encode` comes before the denoiser is loaded."""
    loaded = load(require_run(folder) / RESOLVED, resolved=True)
    config = change(loaded.config)
    hardware = detect(config.model.device)
    device = torch.device("cpu" if hardware.kind == "cpu" else "cuda")
    task = DiffusionTask(config)
    precision = resolve_precision(config, loaded.sources, hardware, task.roles).precision
    task.check(precision)
    encode(task, device)
    task.take_base(RunFolder(folder).base)
    result = next((folder / name for name in ("adapter", "model") if fault(folder / name) is None), None)
    model: nn.Module
    if result is not None:
        model, taken = task.reload(result, precision, device), result.name
    else:
        store = CheckpointStore(RunFolder(folder).checkpoints)
        step, _ = store.newest_whole()
        if step is None:
            raise UsageError(f"{folder}: neither a result nor a whole checkpoint yet", fix=f"isotype train --resume {folder}")
        model, _ = task.denoiser(precision, device)
        restore_model(model, store.load(step).tensors)
        taken = f"checkpoint step_{step}"
    return task, model.eval(), device, taken
