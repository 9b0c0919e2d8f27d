"""Checks the settings of a run before anything is loaded. It finds settings that do not fit the
pipeline or that contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ...config.schema import RunConfig
from ...config.sources import PictureSource, control_folders
from ...errors import UsageError
from ...model.adapter import check_lora_branch
from ...model.adapter_settings import ADAPTER_FILE
from ...precision.precision import Precision
from ...precision.quantised_base import check_base
from ...wording import pluralise
from .denoiser import block_layers, outline_base
from .families import EDIT_FAMILIES, FAMILIES
from .pipeline import PipelineFolder
from .result import (
    NO_DORA,
    is_lokr,
    read_adapter_settings,
    read_shapes,
    refuse_adapter_of_another_model,
    refuse_without_comfyui_support,
)
from .sample import Prompt, refuse_prompts
from .text_encoders import PREFIX


def refuse_incompatible_settings(
    config: RunConfig,
    folder: PipelineFolder,
    precision: Precision,
    sources: Sequence[PictureSource],
    prompts: Sequence[Prompt],
    start_file: Path | None = None,
) -> None:
    """Raises UsageError for settings that do not fit the pipeline or that contradict each other.

    folder      the pipeline, with the run's settings of the denoiser
    start_file  the LoRA file from which the folder `adapter.start_from` was written
    """
    family = folder.family
    adapter = config.adapter
    check_lora_branch(config, precision)
    if config.train.ema is None and config.precision.ema is not None:
        raise UsageError(
            f"precision.ema: {config.precision.ema} has no effect without train.ema",
            fix="train.ema: 0.999",
        )
    folder.refuse_missing_weights()
    check_base(folder.published_quantisation, precision, str(config.model.name))
    _refuse_text_encoders(config, folder, precision)
    _refuse_start(config, folder, start_file)
    if adapter.kind != "none" and adapter.targets != "all-linear":
        _refuse_encoders(adapter.targets, folder)
    if adapter.kind == "none" and family.frozen_layers:
        raise UsageError(
            f"adapter.kind: none: the loss of {family.pipeline} does not depend on the layers for"
            " sound, and weight decay would shrink them",
            fix="adapter.kind: lora",
        )
    if adapter.kind == "lokr" and precision.packed:
        raise UsageError(
            f"adapter.kind: lokr: the base is packed ({precision.base}), and PEFT's LoKr needs"
            " plain weights",
            fix="adapter.kind: lora",
        )
    if config.run.adapter_format == "comfyui":
        if adapter.kind == "none":
            raise UsageError(
                "run.adapter_format: has no effect with adapter.kind: none",
                fix="remove run.adapter_format",
            )
        refuse_without_comfyui_support(family, is_lokr=adapter.kind == "lokr")
        if family.fuses_unequal_outputs and adapter.targets != "all-linear":
            raise UsageError(
                f"run.adapter_format: comfyui: {family.pipeline}: ComfyUI stores queries, keys and"
                " values in one matrix, so that each of them needs an adapter",
                fix="adapter.targets: all-linear",
            )
    if not family.edits_pictures:
        _refuse_controls(config, sources, family.pipeline)
    elif not family.takes_several_controls:
        _refuse_several_controls(config, sources, family.pipeline)
    if family.encodes_control and config.images.flip:
        raise UsageError(
            f"images.flip: the text encoder of {family.pipeline} sees the picture as it is, not its"
            " mirror image",
            fix="images.flip: false",
        )
    refuse_prompts(prompts, family)
    _refuse_frames(config, folder, sources, prompts)
    _refuse_text_length(config.diffusion.max_text_length, folder)


def _refuse_frames(
    config: RunConfig,
    folder: PipelineFolder,
    sources: Sequence[PictureSource],
    prompts: Sequence[Prompt],
) -> None:
    """Checks the settings for clips and for the frames of samples. Raises UsageError."""
    images = config.images
    family = folder.family
    has_clips = any(source.frames > 1 for source in sources)
    frame_counts = {
        "images.frames": images.frames,
        **{f"{source.key}.frames": source.frames for source in sources},
        "run.sample_frames": config.run.sample_frames or 1,
        "run.samples: frames": max(
            (prompt.overrides.get("frames", 1) for prompt in prompts), default=1
        ),
    }
    if family.frame_rate is None:
        if images.frame_rate is not None:
            frame_counts["images.frame_rate"] = 2
        for key, frames in frame_counts.items():
            if frames > 1:
                raise UsageError(
                    f"{key}: has no effect: {family.pipeline} generates pictures, not videos",
                    fix=f"remove {key}",
                )
        return
    step = family.latents.frame_step(folder.config("vae"))
    for key, frames in frame_counts.items():
        if (frames - 1) % step:
            raise UsageError(
                f"{key}: {frames}: the VAE combines {step} frames after the first one: expected 1"
                f" plus a multiple of {step}",
                fix=f"{key}: {1 + (frames - 1) // step * step}",
            )
    if images.frame_rate is not None and max(frame_counts.values()) == 1:
        raise UsageError(
            "images.frame_rate: has no effect on pictures",
            fix="images.frames: the length of a clip",
        )
    if not has_clips:
        return
    if images.masks is not None:
        raise UsageError(
            "images.masks: the loss of a clip cannot be limited by a mask",
            fix="remove images.masks",
        )
    for source in sources:
        if source.draw is not None and source.frames > 1:
            raise UsageError(
                f"{source.key}.draw: the model draws pictures, and frames is {source.frames}",
                fix="frames: 1 in this entry, or a folder of clips",
            )


def _refuse_text_length(length: int | None, folder: PipelineFolder) -> None:
    family = folder.family
    if length is None or family.max_text_length is not None:
        return
    if family.max_clip_windows > 1:
        window = folder.clip_length() - 2
        accepted = [window * count for count in range(1, family.max_clip_windows + 1)]
        if length not in accepted:
            raise UsageError(
                f"diffusion.max_text_length: {length}: {family.pipeline} reads captions in windows of"
                f" {window} tokens: expected {', '.join(map(str, accepted))}"
            )
        return
    if family.encodes_control:
        reason = "does not cut instructions"
    else:
        reason = "has CLIP encoders only"
    raise UsageError(
        f"diffusion.max_text_length: {length} has no effect: {family.pipeline} {reason}",
        fix="remove diffusion.max_text_length",
    )


TRAINED_ON_PAIRS = "on pairs: " + ", ".join(
    name for name, family in (FAMILIES | EDIT_FAMILIES).items() if family.edits_pictures
)


SEVERAL_REFERENCES = ", ".join(
    name for name, family in (FAMILIES | EDIT_FAMILIES).items() if family.takes_several_controls
)


def _refuse_several_controls(
    config: RunConfig, sources: Sequence[PictureSource], pipeline: str
) -> None:
    for source in sources:
        if len(source.controls) > 1:
            raise UsageError(
                f"{_controls_key(config, source)}: {len(source.controls)} folders, and {pipeline}"
                f" takes one picture before the edit; with several pictures: {SEVERAL_REFERENCES}"
            )


def _controls_key(config: RunConfig, source: PictureSource) -> str:
    """Returns the name of the setting that gave the source its folders of pictures before the
    edit.
    """
    is_own = control_folders(config.images.controls, "images.controls") != source.controls
    return f"{source.key}.controls" if is_own else "images.controls"


def _refuse_controls(config: RunConfig, sources: Sequence[PictureSource], pipeline: str) -> None:
    images = config.images
    for source in sources:
        if source.controls:
            key = _controls_key(config, source)
        elif "control" in (source.columns or {}):
            key = (
                "images" if source.columns == images.columns else source.key
            ) + ".columns: control"
        else:
            continue
        raise UsageError(
            f"{key}: has no effect: {pipeline} is trained on captions here; {TRAINED_ON_PAIRS}",
            fix=f"remove {key}",
        )


def _refuse_text_encoders(config: RunConfig, folder: PipelineFolder, precision: Precision) -> None:
    """Raises UsageError if `adapter.text_encoders` does not fit the pipeline or another setting."""
    adapter = config.adapter
    family = folder.family
    if not adapter.text_encoders:
        if adapter.text_encoder_rate is not None:
            raise UsageError(
                "adapter.text_encoder_rate: has no effect without adapter.text_encoders",
                fix="adapter.text_encoders: true",
            )
        return
    reason = None
    fix = "adapter.text_encoders: false"
    if not family.trainable_encoders:
        reason = (
            f"only those of SDXL and Stable Diffusion are trained, and this is a {family.pipeline}"
        )
    elif adapter.kind != "lora":
        reason = f"adapter.kind: {adapter.kind} has none for text encoders"
        fix = "adapter.kind: lora"
    elif adapter.dora:
        reason = "diffusers does not load the lengths of a DoRA into text encoders"
        fix = "adapter.dora: false"
    elif isinstance(rates := adapter.text_encoder_rate, list) and len(rates) != len(
        family.trainable_encoders
    ):
        encoders = pluralise(len(family.trainable_encoders), "encoder")
        reason = (
            f"text_encoder_rate has {pluralise(len(rates), 'rate')}, and a {family.pipeline} has"
            f" {encoders}"
        )
        fix = "adapter.text_encoder_rate: one rate for all"
    elif config.model.offload != "none":
        reason = f"model.offload: {config.model.offload} is not offered with it"
        fix = "model.offload: none"
    elif precision.text_encoder != precision.compute:
        reason = (
            f"encoders that are trained work in precision.compute ({precision.compute}), not in"
            f" {precision.text_encoder}"
        )
        fix = f"precision.text_encoder: {precision.compute}"
    for part in family.trainable_encoders:
        if reason is None and "CLIPTextModel" not in (
            kind := str(folder.index.get(part, [None, None])[1])
        ):
            reason = f"{part} is a {kind}, and only CLIP's encoders are trained"
        elif reason is None and folder.config(part).get("use_attention_mask"):
            reason = f"{part} takes a mask (use_attention_mask), which is not offered"
    if reason is not None:
        raise UsageError(f"adapter.text_encoders: {reason}", fix=fix)


def _refuse_start(config: RunConfig, folder: PipelineFolder, start_file: Path | None) -> None:
    """Checks the adapter that `adapter.start_from` names. Raises UsageError if this adapter belongs
    to another model, if it is of another kind, or if it cannot be saved in the format
    `run.adapter_format`.
    """
    adapter = config.adapter
    setting = "adapter.start_from"
    if adapter.start_from is None:
        return
    start = Path(adapter.start_from)
    shown_start = start_file or start
    has_encoders = any(f".{PREFIX}" in name for name in read_shapes(start / ADAPTER_FILE, setting))
    if has_encoders != adapter.text_encoders:
        if has_encoders:
            encoder_text = "has matrices of text encoders"
        else:
            encoder_text = "has none of text encoders"
        fix = f"adapter.text_encoders: {str(has_encoders).lower()}"
        if has_encoders:
            fix += ", with a rate above 0 (adapter.text_encoder_rate); or a file without them"
        raise UsageError(f"{setting}: {shown_start} {encoder_text}", fix=fix)
    refuse_adapter_of_another_model(outline_base(folder, config), start, setting)
    settings = read_adapter_settings(start, setting)
    if adapter.kind != "none" and is_lokr(start) != (adapter.kind == "lokr"):
        start_kind = str(settings.get("peft_type")).lower()
        raise UsageError(
            f"{setting}: {shown_start} is a {start_kind}, and adapter.kind is {adapter.kind}",
            fix=f"adapter.kind: {start_kind}",
        )
    if config.run.adapter_format == "comfyui" and settings.get("use_dora"):
        raise UsageError(
            f"run.adapter_format: comfyui: {setting}: {start}: {NO_DORA}",
            fix="remove run.adapter_format",
        )


# the names of text encoders in diffusers, transformers and kohya's scripts
_ENCODERS = re.compile(r"text_?encoder|text_model|(^|[._])te[123]?($|[._])")


def _refuse_encoders(targets: str | Sequence[str], folder: PipelineFolder) -> None:
    """Raises UsageError if a name in `adapter.targets` matches no layer of the denoiser, but
    matches a text encoder or one of its layers.
    """
    denoiser = folder.denoiser_outline()
    unknown = [
        name
        for name in ([targets] if isinstance(targets, str) else targets)
        if not _names_a_layer(name, denoiser)
    ]
    encoders = folder.encoder_outlines() if unknown else []
    for name in unknown:
        if _ENCODERS.search(name) or any(_names_a_layer(name, encoder) for encoder in encoders):
            layers = block_layers(denoiser, folder.family.adapted_classes(denoiser))
            layer_names = dict.fromkeys(
                re.sub(r".*?([^.]+(\.\d+)?)$", r"\1", layer) for layer in layers
            )
            if folder.family.trainable_encoders:
                encoder_advice = "adapter.text_encoders: true adapts the encoders beside it, or "
            else:
                encoder_advice = ""
            raise UsageError(
                f"adapter.targets: {name} names a text encoder, and these are layers of the"
                f" {folder.denoiser_part}",
                fix=(
                    f"{encoder_advice}adapter.targets: all-linear, or some of: {', '.join(list(layer_names)[:8])}"
                ),
            )


def _names_a_layer(name: str, model: nn.Module) -> bool:
    """Returns True if a module's name is `name`, ends in it, or matches it as a pattern."""
    try:
        pattern = re.compile(rf"(.*\.)?({name})")
    except re.error:
        pattern = re.compile(rf"(.*\.)?{re.escape(name)}")
    return any(pattern.fullmatch(module) for module, _ in model.named_modules())
