"""Merges the adapter of a diffusion run into the pipeline, draws pictures with the trained model,
and evaluates the run on other pictures.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..config.load import load
from ..config.schema import RunConfig
from ..dtypes import to_torch
from ..environment.hardware import detect
from ..errors import UsageError
from ..model.build import resolve_precision
from ..model.export import digest_tensors, refuse_difference
from ..precision.precision import Precision
from ..runs.checkpoint.atomic_folder import find_damage, write_file, write_folder
from ..runs.checkpoint.snapshot import average_weights, restore_model
from ..runs.folder import (
    RESOLVED,
    RunFolder,
    refuse_non_empty,
    require_run,
    split_run_and_adapter,
    with_located_base,
)
from ..tasks.diffusion.batches import Batch
from ..tasks.diffusion.data import make_encoder
from ..tasks.diffusion.encode import TextInput
from ..tasks.diffusion.model import empty_batch, load_model
from ..tasks.diffusion.pipeline import PipelineFolder
from ..tasks.diffusion.result import MODEL_FILE, load_result, write_comfyui
from ..tasks.diffusion.sample import Sample, sample
from ..tasks.diffusion.single_file import write_with_unet
from ..tasks.diffusion.task import DiffusionTask
from ..tasks.diffusion.text_encoders import PREFIX
from ..training.task import Evaluation, eval_mode
from .loaded import find_result, load_newest, result_name
from .merge import MergeResult, merged_dtype, merged_state, refuse_other_loss

COMPARED_ROWS = 4  # rows on which the merged model is compared with the adapter
# captions for text encoders that the run trained
CAPTIONS = ("a red circle", "a photo of a dog in the snow", "a house on a hill", "")


def merge_denoiser(run: Path, out: Path, *, dtype: str | None = None) -> MergeResult:
    """Writes the folder of the pipeline with the merged denoiser. Compares the loss of the merged
    denoiser with the loss of the denoiser with its adapter, on random latents.

    Raises  UsageError if the run has no adapter, RunError SV001 if the losses differ
    """
    run, intermediate = split_run_and_adapter(run)
    task, device = _open_task(run, lambda config: _drop_start(_drop_samples(config)))
    config = task.config
    precision = task.run.precision
    adapter = _find_adapter(run, intermediate, config, f"{run / 'model'} is merged already")
    refuse_non_empty(out)
    task.run = task.run.with_drawn_denoiser(RunFolder(run).base)
    task.run.folder.fetch()
    reason = "as asked"
    if dtype is None:
        dtype, reason = merged_dtype(precision)
    model = load_result(adapter, task.run.folder, config, precision, device)
    state, noise, count = merged_state(model, to_torch(dtype))
    batch = random_batch(task, device)
    adapter_loss = _batch_loss(task, model, batch, precision)
    base_model = model.get_base_model()  # type: ignore[operator]  # a PeftModel's method
    buffers = {
        name: buffer.detach().cpu().contiguous() for name, buffer in base_model.named_buffers()
    }
    encoders: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in state if name.startswith(PREFIX)]:
        part, _, parameter_name = name.removeprefix(PREFIX).partition(".")
        encoders.setdefault(part, {})[parameter_name] = state[name]
    denoiser_state = {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}
    outline = task.run.folder.denoiser_outline()
    persistent = set(outline.state_dict())
    del model

    def fill(folder: Path) -> None:
        base = task.run.folder.path
        part = task.run.folder.denoiser_part
        parts_outside = task.run.folder.parts_outside

        def ignore(directory: str, names: list[str]) -> list[str]:
            if Path(directory) == base:
                return [part]
            if Path(directory).name in parts_outside:
                return [name for name in names if ".safetensors" in name]
            return []

        shutil.copytree(base, folder, dirs_exist_ok=True, ignore=ignore)
        task.run.folder.save_other_parts(folder)
        (folder / part).mkdir()
        outline.save_config(folder / part)
        tables = {name: buffer for name, buffer in buffers.items() if name in persistent}
        save_file(
            {**denoiser_state, **tables}, folder / part / MODEL_FILE, metadata={"format": "pt"}
        )
        for encoder, tensors in encoders.items():
            for file in (folder / encoder).glob("*.safetensors*"):
                file.unlink()
            save_file(tensors, folder / encoder / "model.safetensors", metadata={"format": "pt"})
        if (
            part == "unet"
            and not encoders
            and (original := Path(task.base_name).expanduser()).is_file()
        ):
            write_with_unet(original, {**state, **tables}, outline.config, folder / original.name)
        facts = {"base": str(base), "run": str(run), "dtype": dtype, "merge_noise": noise}
        (folder / "merge.json").write_text(json.dumps(facts, indent=1) + "\n")

    merged_loss = math.nan

    def compare(folder: Path) -> None:
        nonlocal merged_loss
        merged = _load_merged(folder, task, precision, dtype, device)
        refuse_difference(out, digest_tensors(state, to_torch(dtype)), merged, to_torch(dtype))
        merged_loss = _batch_loss(task, merged, batch, precision)
        refuse_other_loss(out, merged_loss, adapter_loss)

    write_folder(out, fill, check=compare, next_action="merge again")
    return MergeResult(out, dtype, reason, count, noise, adapter_loss, merged_loss, COMPARED_ROWS)


def random_batch(task: DiffusionTask, device: torch.device) -> Batch:
    """Returns a batch of random latents and noise at evenly spaced noise levels. Text embeddings
    are random too, unless the run trained the text encoders. In that case, the text encoders encode
    some fixed captions.
    """
    empty_inputs = empty_batch(task.run, COMPARED_ROWS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)

    def draw_normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    if "ids" not in empty_inputs.text:
        text = {
            name: torch.ones_like(tensor) if name == "mask" else draw_normal(tensor)
            for name, tensor in empty_inputs.text.items()
        }
    else:
        encoder = make_encoder(task.run, device)
        keys = encoder.encode_captions([TextInput(caption) for caption in CAPTIONS])
        text = {
            name: torch.stack([encoder.store.get(key)[name] for key in keys.values()])
            for name in empty_inputs.text
        }
    levels = torch.linspace(0.1, 0.9, COMPARED_ROWS, dtype=empty_inputs.sigma.dtype)
    return Batch(
        draw_normal(empty_inputs.latents),
        draw_normal(empty_inputs.noise),
        levels,
        text,
        lengths=empty_inputs.lengths,
        controls=tuple(map(draw_normal, empty_inputs.controls)),
    ).to(device)


def _batch_loss(task: DiffusionTask, model: nn.Module, batch: Batch, precision: Precision) -> float:
    with eval_mode(model):
        return float(task.loss_sum(model, batch, dtype=precision.loss)) / batch.weight


def _load_merged(
    out: Path, task: DiffusionTask, precision: Precision, dtype: str, device: torch.device
) -> Any:
    # fp32 products of half-precision weights do not exist, so the merged model computes in the
    # dtype of its weights
    compute = dtype if precision.compute == "fp32" else precision.compute
    merged_precision = precision.but(
        base=dtype,
        trainable=dtype,
        compute=compute,
        generate=compute,
        save=dtype,
        text_encoder=dtype,
    )
    merged = PipelineFolder.open(str(out)).for_expert(task.config.diffusion.expert)
    return load_result(
        out / merged.denoiser_part,
        merged,
        _change_section(task.config, "adapter", kind="none"),
        merged_precision,
        device,
    )


def export_comfyui(run: Path, intermediate: Path | None, out: Path) -> int:
    """Writes an adapter for ComfyUI, and returns the number of its modules.

    intermediate  the folder of an intermediate adapter; None means the result
    Raises        UsageError for a run without an adapter, and for a family that ComfyUI does not
                  support
    """
    config = with_located_base(load(run / RESOLVED, resolved=True).config, run)
    adapter = _find_adapter(run, intermediate, config, "there is no adapter to export")
    family = PipelineFolder.open(
        str(config.model.name), revision=config.model.revision, vae=config.model.vae
    ).family
    return write_file(
        out, lambda file: write_comfyui(adapter, file, family), next_action="export again"
    )


def _find_adapter(
    run: Path, intermediate: Path | None, config: RunConfig, consequence: str
) -> Path:
    if config.adapter.kind == "none":
        raise UsageError(f"{run}: this run trained every weight: {consequence}")
    adapter = intermediate or run / "adapter"
    if (reason := find_damage(adapter)) is not None:
        raise UsageError(f"{adapter}: {reason}", fix=f"isotype train --resume {run}")
    return adapter


def draw_pictures(
    folder: Path,
    prompts: Sequence[str],
    *,
    seed: int | None = None,
    controls: Sequence[Path] = (),
) -> tuple[str, list[Sample]]:
    """Draws a picture for each prompt. Returns the name of the weights (`adapter`, `model`,
    `checkpoint step_N`) and the pictures.

    prompts   by default the run's prompts
    controls  the pictures that the prompts edit
    Raises    UsageError if there are no prompts, or if the run has neither a result nor a checkpoint
    """
    control_setting = {"control": [str(control) for control in controls]} if controls else {}

    def set_prompts(config: RunConfig) -> RunConfig:
        if prompts:
            return _change_section(
                config, "run", samples=[{"prompt": text, **control_setting} for text in prompts]
            )
        return config

    def encode(task: DiffusionTask, device: torch.device) -> None:
        if not task.run.prompts:
            raise UsageError(
                f"{folder}: the run has no prompts of its own (run.samples)",
                fix=f'isotype sample {folder} "a picture of ..."',
            )
        task.data.encode_prompts(device)

    task, model, device, weights_name = _load_run(folder, encode, set_prompts)
    run = task.run
    settings = run.sample_settings
    if seed is not None:
        settings = replace(settings, seed=seed)
    encoded = task.data.encoded_prompts(run.prompts)
    samples = sample(model, run.folder, run.config, run.precision, encoded, settings, device)
    return weights_name, list(samples)


def evaluate_pictures(
    folder: Path, pictures: str, *, batch_size: int | None = None
) -> tuple[str, Evaluation]:
    """Evaluates a run on the pictures that `pictures` names. Returns the name of the evaluated
    weights, and their loss at fixed noise levels. The loss is given as a mean, and also for parts
    of the range of noise levels.

    Raises  UsageError for pictures that a run could not use as data, and for a run that has neither
            a result nor a checkpoint
    """
    cleared_keys = ("eval", "regularisation", "masks", "controls", "columns", "limit")
    images = {**dict.fromkeys(cleared_keys), "train": pictures, "eval_split": 0.0}

    def set_pictures(config: RunConfig) -> RunConfig:
        config = _change_section(
            config, "train", eval_batch_size=batch_size or config.train.eval_batch_size
        )
        return _drop_samples(_change_section(config, "images", **images))

    def encode(task: DiffusionTask, device: torch.device) -> None:
        task.load_data()
        task.encode(device)

    task, model, device, weights_name = _load_run(folder, encode, set_pictures)
    return weights_name, task.evaluate(model, device, dtype=task.run.precision.loss)


def _open_task(
    folder: Path, change: Callable[[RunConfig], RunConfig]
) -> tuple[DiffusionTask, torch.device]:
    """Returns the `DiffusionTask` of a run, after checking its precision on this machine, and the
    device.
    """
    loaded = load(require_run(folder) / RESOLVED, resolved=True)
    config = change(with_located_base(loaded.config, folder))
    hardware = detect(config.model.device)
    task = DiffusionTask(config)
    task.check(resolve_precision(config, loaded.sources, hardware, task.roles).precision)
    return task, torch.device("cpu" if hardware.kind == "cpu" else "cuda")


def _drop_samples(config: RunConfig) -> RunConfig:
    """Removes the prompts, so that they are not encoded. The pictures that belong to the prompts
    may be missing."""
    return _change_section(config, "run", samples=[])


def _drop_start(config: RunConfig) -> RunConfig:
    """Removes `adapter.start_from`, because the adapter with which a finished run began may be
    missing.
    """
    return _change_section(config, "adapter", start_from=None)


def _change_section(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _load_run(
    folder: Path,
    encode: Callable[[DiffusionTask, torch.device], None],
    change: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> tuple[DiffusionTask, Any, torch.device, str]:
    """Returns the task, the model in evaluation mode, the device, and the name of the weights.
    `encode` is called before the denoiser is loaded.
    """
    folder, intermediate = split_run_and_adapter(folder)
    result = find_result(folder, intermediate)

    def change_config(config: RunConfig) -> RunConfig:
        if result is not None:
            config = _drop_start(config)
        return change(config)

    task, device = _open_task(folder, change_config)
    precision = task.run.precision
    encode(task, device)
    task.run = task.run.with_drawn_denoiser(RunFolder(folder).base)
    model: nn.Module
    if result is not None:
        model = task.reload(result, precision, device)
        weights_name = result_name(folder, result)
    else:
        checkpoint = load_newest(folder)
        model, _ = load_model(task.run, precision, device, {})
        restore_model(model, average_weights(checkpoint.tensors, task.config.train.beta1))
        weights_name = f"checkpoint step_{checkpoint.step}"
    return task, model.eval(), device, weights_name
