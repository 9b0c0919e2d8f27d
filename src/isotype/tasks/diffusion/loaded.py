"""A diffusion run's folder, loaded as it was trained, to draw pictures with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...config.load import load
from ...environment.hardware import detect
from ...errors import UsageError
from ...runs.checkpoint.atomic_folder import fault
from ...runs.checkpoint.snapshot import restore_model
from ...runs.checkpoint.store import CheckpointStore
from ...runs.folder import RESOLVED, RunFolder, require_run
from ...training.setup import resolve_precision
from .sample import Sample
from .task import EMPTY, DiffusionTask


def draw_with(folder: Path, prompts: Sequence[str], *, seed: int | None = None) -> tuple[str, list[Sample]]:
    """Which weights were taken (`adapter`, `model`, `checkpoint step_N`), and a picture for each prompt; the run's own prompts by default.

    Raises  UsageError when there are no prompts, or the run has neither a result nor a checkpoint yet
    """
    loaded = load(require_run(folder) / RESOLVED, resolved=True)
    config = loaded.config
    asked = list(prompts) or list(config.run.samples)
    if not asked:
        raise UsageError(f"{folder}: the run has no prompts of its own (run.samples)", fix=f'isotype sample {folder} "a picture of ..."')
    hardware = detect(config.model.device)
    device = torch.device("cpu" if hardware.kind == "cpu" else "cuda")
    task = DiffusionTask(config)
    precision = resolve_precision(config, loaded.sources, hardware, task.roles).precision
    task.check(precision)
    task.encoder = task.new_encoder(device)
    task.text = task.encoder.captions(list(dict.fromkeys([EMPTY, *asked])))
    result = next((folder / name for name in ("adapter", "model") if fault(folder / name) is None), None)
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
    how = task.drawing()
    return taken, task.draw(model.eval(), device, asked, how if seed is None else replace(how, seed=seed))
