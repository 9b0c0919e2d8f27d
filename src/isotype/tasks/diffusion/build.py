"""The denoiser as it is trained: adapter, exact noise levels, Isotype's ops, precision; with its weights or on the meta device."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...config.schema import RunConfig
from ...model.adapter import attach_adapter
from ...optimize import Manifest, optimize
from ...precision.apply import apply_precision
from ...precision.parts import Part
from ...precision.precision import Precision
from .exact_time import keep_time_exact
from .families import Family
from .quantise import block_layers


def built(
    denoiser: Any, family: Family, config: RunConfig, precision: Precision, *, device_type: str, part: Part | None = None
) -> tuple[nn.Module, Manifest]:
    """The model that is trained, and what Isotype replaced in it. `part`: what this process will keep of it, where several share it."""
    denoiser.requires_grad_(config.adapter.kind == "none")
    if config.adapter.kind == "none":
        model: nn.Module = denoiser
    else:
        model = attach_adapter(denoiser, config.adapter, seed=config.train.seed, task_type=None, targets=targets(denoiser, family, config))
    return model, put_under(model, denoiser, family, config, precision, device_type=device_type, part=part)


def put_under(
    model: nn.Module, denoiser: nn.Module, family: Family, config: RunConfig, precision: Precision, *, device_type: str,
    part: Part | None = None,
) -> Manifest:  # fmt: skip
    """Puts exact noise levels, ops and precision on a denoiser that has its adapter already."""
    if family.time_scale is not None:
        keep_time_exact(denoiser, family.time_scale)
    if config.model.optimize:
        manifest = optimize(model, precision, device_type=device_type, lora_branch=config.model.lora_branch)
    else:
        manifest = Manifest(notes=["model.optimize: false"])
    if family.time_scale is not None and precision.compute != "fp32":
        manifest.notes.append(f"{type(denoiser).__name__} rounds its noise level to {precision.compute}: this instance takes it in fp32")
    if unused := family.unused(denoiser):
        manifest.unused = unused
        manifest.notes.append(f"{type(denoiser).__name__} drops the result of {', '.join(unused)}: nothing is learnt there")
    apply_precision(model, precision, device_type=device_type, part=part)
    return manifest


def targets(denoiser: Any, family: Family, config: RunConfig) -> list[str]:
    """The modules that get an adapter: with `all-linear` every linear layer of the denoiser's blocks."""
    given = config.adapter.targets
    if given != "all-linear":
        return [given] if isinstance(given, str) else list(given)
    return list(block_layers(denoiser, family.blocks_of(denoiser)))
