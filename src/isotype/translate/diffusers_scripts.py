"""Translates a shell script to an Isotype configuration if it starts one of diffusers' example
scripts, such as `train_dreambooth_lora_flux.py`.
"""

from __future__ import annotations

import re
from typing import Any

from . import pictures, transforms
from .source import Source
from .transforms import ConfigDraft


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    if transforms.is_enabled(source.get("train_text_encoder_ti")):
        return "train_text_encoder_ti: textual inversion is not offered"
    if transforms.is_enabled(source.get("train_text_encoder")) and not _CLIP_SCRIPTS.search(
        source.method
    ):
        return f"train_text_encoder: {pictures.NO_TEXT_ENCODER_NOTE}"
    return None


_CLIP_SCRIPTS = re.compile(r"_lora(_sdxl|_sd15)?(_advanced)?(\.py)?$")
_TEXT_RATE = 5e-6  # default of `text_encoder_lr` in the scripts


def _require_scheme(scheme: str, target: str) -> transforms.Handler:
    """Returns a handler for a number that has an effect only if the file chooses this weighting
    scheme.
    """
    return transforms.require_key(
        "weighting_scheme",
        scheme,
        transforms.convert_number(target),
        f"without weighting_scheme: {scheme}",
    )


# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "the caption of images.train": "instance_prompt",
    "images.regularisation": (
        "class_data_dir class_prompt with_prior_preservation prior_loss_weight"
    ),
    "the default: images.crop: center": "center_crop",
    pictures.CACHED_NOTE: "cache_latents cache_dir offload",
    pictures.NOT_UPLOADED_NOTE: "push_to_hub hub_*",
    transforms.NO_GPU_COUNT_NOTE: "num_processes",
    transforms.IRRELEVANT_NOTE: (
        "variant sample_batch_size prediction_type"
        " precondition_outputs logging_dir dataloader_num_workers local_rank"
        " enable_xformers_memory_efficient_attention set_grads_to_none"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "download it, and name its folder in images.train": "dataset_name",
    "images.columns, and a file of rows": (
        "dataset_config_name image_column cond_image_column caption_column"
    ),
    "each prompt gives one picture: name it twice in run.samples": "num_validation_images",
    "run.sample_every counts steps": "validation_epochs",
    "images.max_aspect: 2 puts pictures into buckets by their shape": "aspect_ratio_buckets",
    "precision.preset: nf4-lora quantises the base": "bnb_quantization_config_path",
    "train.learning_rate is the rate of a step, whatever its rows": "scale_lr",
    "of Prodigy": "prodigy_*",
    "train.schedule has no powers and no restarts": "lr_num_cycles lr_power",
    "isotype train --resume RUN": "resume_from_checkpoint",
}
# the tool's distribution of noise levels -> Isotype's
_TIMESTEPS = {"logit_normal": "logit_normal", "mode": "mode", "none": "uniform"}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **pictures.DIFFUSERS_KEYS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        images=(
            "train=instance_data_dir train=train_data_dir resolution flip=random_flip"
            " caption_dropout"
        ),
        diffusion="max_text_length=max_sequence_length",
        adapter="r=rank alpha=lora_alpha dropout=lora_dropout",
        run="save_every=checkpointing_steps",
    ),
    "validation_prompt": transforms.convert_to("run.samples", lambda value: [str(value)]),
    "repeats": transforms.report_changed("repeats: {} of images.train"),
    # adapter
    "train_text_encoder": transforms.set_if_enabled("adapter.text_encoders", True),
    "text_encoder_lr": transforms.require_key(
        "train_text_encoder", "on", pictures.convert_text_encoder_rate, "without train_text_encoder"
    ),
    "use_dora": transforms.set_if_enabled("adapter.dora", True),
    "num_class_images": transforms.require_key(
        "with_prior_preservation",
        "on",
        transforms.report_changed("draw: {} of images.regularisation"),
        "without class pictures",
    ),
    "lora_layers": transforms.convert_list("adapter.targets"),
    **transforms.same_handler(pictures.set_vae, "pretrained_vae_model_name_or_path vae_path"),
    **transforms.same_handler(
        pictures.note_precision_key,
        "mixed_precision launcher.mixed_precision allow_tf32 upcast_before_saving"
        " prior_generation_precision",
    ),
    # steps
    "optimizer": transforms.convert_optimizer,
    "use_8bit_adam": transforms.set_if_enabled("train.optimizer", "adamw8bit"),
    "num_train_epochs": transforms.require_key(
        "max_train_steps",
        "",
        transforms.convert_to("train.epochs", float),
        "max_train_steps decides",
    ),
    # the objective
    "weighting_scheme": transforms.convert_choice(
        "diffusion.timesteps",
        _TIMESTEPS,
        f"{pictures.TIMESTEPS_NOTE}; the loss counts every level alike",
    ),
    "logit_mean": _require_scheme("logit_normal", "diffusion.logit_mean"),
    "logit_std": _require_scheme("logit_normal", "diffusion.logit_std"),
    "mode_scale": _require_scheme("mode", "diffusion.mode_scale"),
    "use_ema": transforms.set_if_enabled("train.ema", 0.999),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds the defaults of diffusers' scripts to the new configuration where they differ from the
    defaults of Isotype.
    """
    has_lora = "lora" in source.method or source.get("rank") is not None
    draft.set_adapter_defaults("lora" if has_lora else "none", 4)
    if (
        "adapter.text_encoders" in draft.settings
        and draft.lowercase_value("optimizer") != "prodigy"
        and re.search("sdxl|advanced", source.method)
    ):
        draft.set_default("adapter.text_encoder_rate", _TEXT_RATE)
    # the script's option, else the option of accelerate's launcher
    dtype_name = source.get("mixed_precision") or source.get("launcher.mixed_precision")
    pictures.set_default_preset(draft, dtype_name)
    draft.set_defaults(
        pictures.COMMON_DEFAULTS
        | {
            "train.batch_size": 4,
            "train.weight_decay": 1e-4 if has_lora else 1e-2,
            "images.resolution": 512,
        }
    )
    if source.get("weighting_scheme") is None and any(
        family in source.method for family in ("flux", "qwen", "z_image")
    ):
        # weighting_scheme none
        draft.set_defaults({"diffusion.timesteps": "uniform", "diffusion.shift": 1.0})
    if "flux" in source.method:
        draft.set_default("diffusion.guidance", 3.5)
    if "train.epochs" not in draft.settings:
        draft.set_default("train.steps", 500)
    sources_by_setting = {}
    if "images.train" in draft.settings:
        settings: dict[str, Any] = {
            "caption": source.get("instance_prompt"),
            "repeats": source.get("repeats"),
        }
        sources_by_setting["images.train"] = [
            pictures.picture_source(draft.settings["images.train"], **settings)
        ]
    if transforms.is_enabled(source.get("with_prior_preservation")) and source.get(
        "class_data_dir"
    ):
        number = source.get("num_class_images") or 100  # the scripts' default
        settings = {
            "caption": source.get("class_prompt"),
            "weight": source.get("prior_loss_weight"),
            "draw": number,
        }
        sources_by_setting["images.regularisation"] = [
            pictures.picture_source(source.get("class_data_dir"), **settings)
        ]
    pictures.set_sources(draft, sources_by_setting)
