"""Settings of a run that do not fit its pipeline, or each other: each is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from ...config.schema import RunConfig
from ...config.sources import PictureSource
from ...errors import UsageError
from ...model.adapter import check_branch
from ...precision.precision import Precision
from ...precision.quantised_base import check_base
from .denoiser import refuse_encoders
from .pipeline import PipelineFolder
from .result import refuse_start, refuse_unread
from .sample import Prompt, refuse_prompts
from .text_encoders import refuse_text_encoders


def refuse_unfit(
    config: RunConfig, folder: PipelineFolder, precision: Precision, sources: Sequence[PictureSource], prompts: Sequence[Prompt]
) -> None:
    """Raises  UsageError. folder: with the denoiser of the run."""
    family, adapter = folder.family, config.adapter
    check_branch(config, precision)
    if config.train.ema is None and config.precision.ema is not None:
        raise UsageError(f"precision.ema: {config.precision.ema} has no effect without train.ema", fix="train.ema: 0.999")
    folder.refuse_lacking_weights()
    check_base(folder.published, precision, str(config.model.name))
    refuse_text_encoders(config, folder, precision)
    refuse_start(config, folder)
    if adapter.kind != "none" and adapter.targets != "all-linear":
        refuse_encoders(adapter.targets, folder)
    if adapter.kind == "lokr" and precision.packed:
        raise UsageError(
            f"adapter.kind: lokr: the base is packed ({precision.base}), and PEFT's LoKr needs plain weights", fix="adapter.kind: lora"
        )
    if config.run.adapter_format == "comfyui":
        if adapter.kind == "none":
            raise UsageError("run.adapter_format: has no effect with adapter.kind: none", fix="remove run.adapter_format")
        refuse_unread(family)
    if not family.pairs:
        _refuse_controls(config, sources, family.pipeline)
    if family.sees_control and config.images.flip:
        raise UsageError(
            f"images.flip: the text encoder of {family.pipeline} sees the picture as it is, not its mirror image", fix="images.flip: false"
        )
    refuse_prompts(prompts, family)
    if config.diffusion.max_text_length is not None and family.max_text_length is None:
        raise UsageError(
            f"diffusion.max_text_length: {config.diffusion.max_text_length} has no effect: "
            f"{family.pipeline} {'does not cut instructions' if family.sees_control else 'has CLIP encoders only'}",
            fix="remove diffusion.max_text_length",
        )


def _refuse_controls(config: RunConfig, sources: Sequence[PictureSource], pipeline: str) -> None:
    images = config.images
    for source in sources:
        if source.controls is not None:
            key = "images.controls" if source.controls == images.controls else f"{source.key}.controls"
        elif "control" in (source.columns or {}):
            key = ("images" if source.columns == images.columns else source.key) + ".columns: control"
        else:
            continue
        raise UsageError(f"{key}: has no effect: {pipeline} does not edit pictures", fix=f"remove {key}")
