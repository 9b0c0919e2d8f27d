"""Describes a trained LoRA for its users. The description is in the metadata of the LoRA's file,
which A1111, Forge and Civitai show, and in the model card.

Sources  Stability's ModelSpec 1.0; the `ss_...` keys of kohya's sd-scripts. The time and the author
         are left out, so that equal runs write equal files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.sources import is_folder_name, picture_sources
from ...model.card import card_header
from ...precision.precision import ROLES, Precision
from .data import PictureData
from .facts import plan_facts, plan_lines, plural_noun
from .families import Family
from .resolved_run import ResolvedRun
from .result import LORA_FILE, rank_metadata

# pipeline -> the architecture in ModelSpec, and the version of the base in kohya's metadata
_ARCHITECTURES = {
    "StableDiffusionPipeline": ("stable-diffusion-v1", "sd_v1"),
    "StableDiffusionXLPipeline": ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
    "StableDiffusion3Pipeline": ("stable-diffusion-3", "sd3"),
    "FluxPipeline": ("flux-1-dev", "flux1"),
    "FluxKontextPipeline": ("flux-1-kontext-dev", "flux1"),
}
_STABLE_DIFFUSION_2 = ("stable-diffusion-v2", "sd_v2")
_NETWORK_MODULES = {"lokr": "lycoris.kohya"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v"}
_MAX_TRIGGER = 200  # characters of a trigger word or caption


def trigger_words(run: ResolvedRun) -> list[str]:
    """Returns the words that a user writes into a prompt to get the trained subject or style. They
    are the value of `images.trigger` or, if there is none, the captions that the configuration sets
    for a whole source of pictures.
    """
    images = run.config.images
    if images.trigger:
        return [images.trigger[:_MAX_TRIGGER]]
    captions = [source.caption for source in picture_sources(images, "train") if source.caption]
    return list(dict.fromkeys(caption[:_MAX_TRIGGER] for caption in captions))


def base_label(name: str) -> str:
    """Returns the name of the base model without the path of its folder."""
    if is_folder_name(name) or Path(name).exists():
        return Path(name).name
    return name


def lora_metadata(data: PictureData, step: int) -> dict[str, str]:
    """Returns the metadata of a LoRA's file, which describes the training. Ranks and alphas are not
    included.
    """
    run = data.run
    config = run.config
    architecture, version = _architecture(run.family, run)
    triggers = trigger_words(run)
    side = max(side for _, side in run.sizes.resolutions)
    facts = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": ", ".join(triggers) or f"LoRA for {base_label(str(config.model.name))}",
        "modelspec.resolution": f"{side}x{side}",
        "ss_base_model_version": version,
        "ss_sd_model_name": base_label(str(config.model.name)),
        "ss_network_module": _NETWORK_MODULES.get(config.adapter.kind, "networks.lora"),
        "ss_resolution": f"({side}, {side})",
        "ss_steps": str(step),
        "ss_max_train_steps": str(config.train.steps or step),
        "ss_learning_rate": f"{config.train.learning_rate:g}",
        "ss_num_train_images": str(data.row_count),
        "ss_v2": str(version == _STABLE_DIFFUSION_2[1]),
    }
    if triggers:
        # A1111 and Forge read trigger words from the table of tags
        tags = dict.fromkeys(triggers, data.row_count)
        facts["modelspec.trigger_phrase"] = ", ".join(triggers)
        facts["ss_tag_frequency"] = json.dumps({"pictures": tags})
    prediction = _PREDICTIONS.get(run.objective.kind)
    if prediction is not None:
        facts["modelspec.prediction_type"] = prediction
        facts["ss_v_parameterization"] = str(prediction == "v")
    return facts


def _architecture(family: Family, run: ResolvedRun) -> tuple[str, str]:
    if family.pipeline == "StableDiffusionPipeline":
        width = run.folder.config(run.folder.denoiser_part).get("cross_attention_dim")
        if width == 1024:  # the width of OpenCLIP's encoder
            return _STABLE_DIFFUSION_2
    name = family.pipeline.removesuffix("Pipeline").lower()
    return _ARCHITECTURES.get(family.pipeline, (name, name))


def picture_card(
    data: PictureData,
    folder: Path,
    precision: Precision,
    *,
    step: int,
    observed: Mapping[str, Mapping[str, int]],
) -> str:
    """Returns the model card of a result. This card replaces PEFT's card, whose fields are empty.

    folder    the folder of the saved result
    observed  for each key of `precision` and each dtype, how many tensors had this dtype
    """
    run = data.run
    config = run.config
    is_adapter = config.adapter.kind != "none"
    triggers = trigger_words(run)
    noun = "pictures" if run.frames == 1 else "videos"
    task = "text-to-image" if run.frames == 1 else "text-to-video"
    extra: dict[str, Any] = {"pipeline_tag": task}
    if run.family.edits_pictures:
        extra["pipeline_tag"] = "image-to-image"
    if is_adapter:
        extra["tags"] = ["diffusers", "lora"]
    if triggers:
        extra["instance_prompt"] = ", ".join(triggers)
    saved_dtype = precision.save_adapter if is_adapter else precision.save_model
    name = str(config.model.name)
    base = base_label(name)
    lines = card_header(
        name,
        f"A LoRA for {noun}" if is_adapter else f"A model for {noun}",
        plan_lines(data)[0],
        f"{step}, in {saved_dtype}",
        {role: getattr(precision, role) for role in ROLES},
        observed,
        library="diffusers",
        extra=extra,
        label=base,
    )
    lines += _settings_table(data, folder, triggers, step=step, is_adapter=is_adapter)
    if run.prompts:
        lines += ["Samples were drawn from these prompts:", ""]
        lines += [f"* {' '.join(prompt.text.split())}" for prompt in run.prompts]
        lines.append("")
    lines += _usage_lines(run, folder, base)
    return "\n".join(lines)


def _settings_table(
    data: PictureData, folder: Path, triggers: list[str], *, step: int, is_adapter: bool
) -> list[str]:
    run = data.run
    config = run.config
    noun = plural_noun(plan_facts(data))
    rows = {
        "trigger words": ", ".join(triggers) or f"none; the captions describe the {noun}",
        "resolution": " and ".join(f"{side} x {side}" for _, side in run.sizes.resolutions),
        "objective": str(run.objective),
        "steps": str(step),
        f"{noun} a step": str(config.train.batch_size * config.train.accumulate),
        "learning rate": f"{config.train.learning_rate:g}, {config.train.schedule}",
        "optimizer": config.train.optimizer,
    }
    if is_adapter:
        ranks = rank_metadata(folder)
        rows["rank"] = ranks.get("ss_network_dim", "")
        rows["alpha"] = ranks.get("ss_network_alpha", "")
    return [
        "| setting | value |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows.items()),
        "",
    ]


def _usage_lines(run: ResolvedRun, folder: Path, base: str) -> list[str]:
    if not (folder / LORA_FILE).is_file():
        return []
    # Wan 2.2 has a second denoiser, `transformer_2`
    is_second = run.folder.denoiser_part != run.family.denoiser
    option = f", load_into_{run.folder.denoiser_part}=True" if is_second else ""
    method = "from_single_file" if run.folder.file is not None else "from_pretrained"
    return [
        "FOLDER is this folder:",
        "",
        "```python",
        "import torch",
        f"from diffusers import {run.family.pipeline}",
        "",
        f"base = {json.dumps(base)}",
        f"pipe = {run.family.pipeline}.{method}(base, torch_dtype=torch.bfloat16)",
        f"pipe.load_lora_weights(FOLDER{option})",
        "```",
        "",
    ]
