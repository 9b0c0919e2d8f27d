"""Merges a diffusion run's LoRA into its denoiser: the run's pipeline as a folder of its own, which diffusers loads."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..config.load import load
from ..dtypes import to_torch
from ..environment.hardware import detect
from ..errors import UsageError
from ..model.run_precision import resolve_precision
from ..model.saved_form import digests, refuse_difference
from ..precision.precision import Precision
from ..runs.checkpoint.atomic_folder import fault, write_folder
from ..runs.folder import RESOLVED, RunFolder, refuse_filled, require_run
from ..tasks.diffusion.batches import Batch
from ..tasks.diffusion.pipeline_folder import PipelineFolder
from ..tasks.diffusion.result import MODEL_FILE, load_result
from ..tasks.diffusion.task import DiffusionTask
from ..training.undisturbed import evaluation_mode
from .merge import Merged, merged_dtype, merged_state, refuse_other_loss

ROWS = 4


def merge_denoiser(run: Path, out: Path, *, dtype: str | None = None) -> Merged:
    """Writes the pipeline's folder with the merged denoiser in it, and compares its loss with the adapter's on random latents.

    Raises  UsageError without an adapter, RunError SV001 when the result differs
    """
    loaded = load(require_run(run) / RESOLVED, resolved=True)
    config, adapter = loaded.config, run / "adapter"
    if config.adapter.kind == "none":
        raise UsageError(f"{run}: this run trained every weight: {run / 'model'} is merged already")
    if (reason := fault(adapter)) is not None:
        raise UsageError(f"{adapter}: {reason}", fix=f"isotype train --resume {run}")
    refuse_filled(out)
    hardware = detect(config.model.device)
    device = torch.device("cpu" if hardware.kind == "cpu" else "cuda")
    task = DiffusionTask(config)
    precision = resolve_precision(config, loaded.sources, hardware, task.roles).precision
    task.check(precision)
    task.take_base(RunFolder(run).base)
    task.folder.fetch()
    dtype, why = (dtype, "as asked") if dtype else merged_dtype(precision)
    model = load_result(adapter, task.folder, config, precision, device)
    state, noise, count = merged_state(model, to_torch(dtype))
    batch = random_batch(task, device)
    adapter_loss = _loss(task, model, batch, precision)
    buffers = {name: b.detach().cpu().contiguous() for name, b in model.get_base_model().named_buffers()}  # type: ignore[operator]  # a PeftModel's method
    outline = task.folder.denoiser_outline()
    persistent = set(outline.state_dict())
    del model

    def fill(folder: Path) -> None:
        base, part = task.folder.path, task.folder.denoiser_part
        shutil.copytree(base, folder, dirs_exist_ok=True, ignore=lambda at, names: [part] if Path(at) == base else [])
        (folder / part).mkdir()
        outline.save_config(folder / part)
        tables = {name: b for name, b in buffers.items() if name in persistent}
        save_file({**state, **tables}, folder / part / MODEL_FILE, metadata={"format": "pt"})
        facts = {"base": str(base), "run": str(run), "dtype": dtype, "merge_noise": noise}
        (folder / "merge.json").write_text(json.dumps(facts, indent=1) + "\n")

    merged_loss = math.nan

    def compare(folder: Path) -> None:
        nonlocal merged_loss
        merged = _load_merged(folder, task, precision, dtype, device)
        refuse_difference(out, digests(state, to_torch(dtype)), merged, to_torch(dtype))
        merged_loss = _loss(task, merged, batch, precision)
        refuse_other_loss(out, merged_loss, adapter_loss)

    write_folder(out, fill, check=compare, then="merge again")
    return Merged(out, dtype, why, count, noise, adapter_loss, merged_loss, ROWS)


def random_batch(task: DiffusionTask, device: torch.device) -> Batch:
    """Latents, noise and text that need no picture and no encoder; levels spread over time."""
    made, generator = task.empty_batch(ROWS, torch.device("cpu")), torch.Generator().manual_seed(0)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    text = {name: torch.ones_like(tensor) if name == "mask" else normal(tensor) for name, tensor in made.text.items()}
    levels = torch.linspace(0.1, 0.9, ROWS, dtype=made.sigma.dtype)
    return Batch(normal(made.latents), normal(made.noise), levels, text).to(device)


def _loss(task: DiffusionTask, model: nn.Module, batch: Batch, precision: Precision) -> float:
    with evaluation_mode(model):
        return float(task.loss_sum(model, batch, dtype=precision.loss)) / batch.weight


def _load_merged(out: Path, task: DiffusionTask, precision: Precision, dtype: str, device: torch.device) -> Any:
    # fp32 products of half-precision weights do not exist: the merged model computes in what it is kept in
    compute = dtype if precision.compute == "fp32" else precision.compute
    wanted = precision.but(base=dtype, trainable=dtype, compute=compute, generate=compute, save=dtype)
    merged = PipelineFolder.open(str(out))
    plain = task.config.model_copy(update={"adapter": task.config.adapter.model_copy(update={"kind": "none"})})
    return load_result(out / merged.denoiser_part, merged, plain, wanted, device)
