"""Loads the model of a diffusion run, builds it without weights, and measures the cost of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...dtypes import to_torch
from ...optimize import Manifest
from ...precision.parts import Part, loading_device
from ...precision.precision import Precision
from ...precision.quantised_base import check_base
from ...training.memory.blocks import apply_offload
from ...training.memory.meta_results import ReuseMetaResults
from ...training.memory.plan import plan_persistent_memory
from ...training.task import ModelOutline, eval_mode
from .batches import Batch
from .denoiser import (
    build_denoiser,
    load_frozen_base,
    outline_base,
    outline_frozen_base,
    record_time_dtypes,
)
from .resolved_run import ResolvedRun


def load_model(
    run: ResolvedRun,
    precision: Precision,
    device: torch.device,
    observed: dict[tuple[str, str], str],
    part: Part | None = None,
) -> tuple[nn.Module, Manifest]:
    """Loads the model to train, with the weights from the pipeline's folder.

    observed  a mapping to which the dtypes of noise levels are added in each step. It maps a key of
              `precision` and the name of a tensor to the dtype
    """
    config = run.config
    offload = config.model.offload
    if config.adapter.kind == "none":
        denoiser = run.folder.denoiser(to_torch(precision.trainable))
        denoiser = denoiser.to(loading_device(device, part))
    else:
        denoiser = load_frozen_base(
            run.folder, config, precision, loading_device(device, part, offload)
        )
    model, manifest = build_denoiser(
        denoiser, run.family, config, precision, device_type=device.type, part=part
    )
    manifest.notes += check_base(
        run.folder.published_quantisation, precision, str(config.model.name)
    )
    record_time_dtypes(model, observed)
    return apply_offload(model, offload, device), manifest


def outline_model(run: ResolvedRun, precision: Precision, *, device_type: str) -> ModelOutline:
    """Builds the model as `load_model` does, but without its weights. Raises UsageError."""
    with ReuseMetaResults():
        return _outline_model(run, precision, device_type=device_type)


def _outline_model(run: ResolvedRun, precision: Precision, *, device_type: str) -> ModelOutline:
    config = run.config
    trains_every_weight = config.adapter.kind == "none"
    total = sum(p.numel() for p in run.folder.denoiser_outline().parameters())
    if trains_every_weight and run.folder.published_quantisation is None:
        denoiser = outline_base(run.folder, config)
    else:
        denoiser = outline_frozen_base(run.folder, config, precision)
    with torch.device("meta"):
        model, _ = build_denoiser(denoiser, run.family, config, precision, device_type=device_type)
        offload_device = torch.device("cpu" if device_type == "cpu" else "meta")
        apply_offload(model, config.model.offload, offload_device)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelOutline(model, trainable, total + (0 if trains_every_weight else trainable))


class LatentShape(NamedTuple):
    """The size of latents: their frames, and their height and width in latent pixels."""

    frames: int
    height: int
    width: int


def _largest_row(run: ResolvedRun) -> LatentShape:
    side = run.sizes.largest.side // run.downscale
    return LatentShape(run.sizes.largest.frames, side, side)


def _largest_sample(run: ResolvedRun) -> LatentShape:
    """Returns the shape of the sample with the most latent pixels."""
    shapes = []
    for prompt in run.prompts:
        settings = prompt.settings(run.sample_settings)
        frames = run.sizes.count_latent_frames(settings.frames)
        height, width = (
            side // run.downscale for side in (settings.size.height, settings.size.width)
        )
        shapes.append(LatentShape(frames, height, width))
    return max(shapes, key=math.prod)


def second_denoiser_bytes(run: ResolvedRun, precision: Precision) -> dict[str, int]:
    """Returns the bytes of the weights of a second denoiser, which is loaded when samples are
    generated. The keys are the devices of a memory plan: `cpu`, and `meta` for a GPU, where
    `model.offload` keeps blocks in host memory. Returns an empty mapping if the pipeline has only
    one denoiser.
    """
    other_folder = run.folder.for_other_expert()
    if other_folder is None:
        return {}
    other = outline_frozen_base(other_folder, run.config, precision).requires_grad_(False)
    bytes_by_device = {}
    for device_type in ("cpu", "meta"):
        with torch.device("meta"):
            apply_offload(other, run.config.model.offload, torch.device(device_type))
        plan = plan_persistent_memory(other, run.config.train, precision)
        bytes_by_device[device_type] = plan.frozen
    return bytes_by_device


def run_largest_sample(
    run: ResolvedRun, other_bytes: dict[str, int], model: nn.Module, device: torch.device
) -> None:
    """Calls the denoiser on the latents of the largest sample, while the weights of the other
    denoiser are in memory. A memory plan measures this call.

    other_bytes  the result of `second_denoiser_bytes`
    """
    other_weights = torch.empty(other_bytes[device.type], dtype=torch.uint8, device=device)
    with eval_mode(model):
        batch = empty_batch(run, 1, device, shape=_largest_sample(run))
        run.losses(model, batch, dtype=run.precision.loss)
    del other_weights


def empty_batch(
    run: ResolvedRun,
    rows: int,
    device: torch.device,
    controls: int | None = None,
    *,
    shape: LatentShape | None = None,
) -> Batch:
    """Returns a batch without data. It has the dtypes of a batch of the run.

    controls  the number of pictures before the edit of a row; by default one if the model edits
              pictures, and otherwise 0
    shape     by default that of the largest pictures or clips
    """
    family = run.family
    folder = run.folder
    if controls is None:
        controls = int(family.edits_pictures)
    dtype = to_torch(run.precision.latents)
    text_dtype = to_torch(run.precision.text_encoder)
    channels = family.latents.channels(folder.config("vae"))
    shape = shape or _largest_row(run)
    latent_shape = [rows, channels, shape.height, shape.width]
    if shape.frames > 1:
        latent_shape.insert(2, shape.frames)
    length = family.count_text_tokens(folder.clip_length(), run.max_text_length)
    length += controls * family.control_text_tokens
    latents, noise = (torch.empty(latent_shape, dtype=dtype, device=device) for _ in range(2))
    if run.config.adapter.text_encoders:
        encoder_count = len(family.trainable_encoders)
        texts = {
            "ids": torch.zeros(rows, encoder_count, length, dtype=torch.long, device=device),
            "captioned": torch.ones(rows, dtype=torch.bool, device=device),
        }
    else:
        shapes = family.text_shapes(folder.config(folder.denoiser_part), length)
        texts = {
            name: torch.empty(rows, *text_shape, dtype=text_dtype, device=device)
            for name, text_shape in shapes.items()
        }
    return Batch(
        latents,
        noise,
        torch.empty(rows, dtype=dtype, device=device),
        texts,
        lengths=(length,) * rows if family.keeps_text_lengths else (),
        controls=tuple(torch.empty_like(latents) for _ in range(controls)),
    )


def outline_forward(run: ResolvedRun, controls: int) -> tuple[nn.Module, Callable[[], Any]]:
    """Returns a denoiser on the meta device and a function that runs its forward on one training
    picture. The denoiser has no adapter and computes in fp32.

    controls  the number of pictures before the edit of a row
    """
    denoiser = outline_base(run.folder, run.config)
    batch = empty_batch(run, 1, torch.device("meta"), controls)
    run.family.prepare(denoiser)
    text = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in batch.text.items()
    }
    batch = replace(batch, text=text)
    return denoiser, lambda: run.losses(denoiser, batch, dtype="fp32")
