"""Translates a training command of kohya's sd-scripts to an Isotype configuration, with the TOML
files that describe the run and its datasets.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    module = str(source.get("network_module") or "")
    if (
        module
        and not re.search(r"(^|\.)lora", module)
        and _parse_arguments(source.get("network_args")).get("algo") != "lokr"
    ):
        return (
            f"network_module: {module} is not offered: adapter.kind is lora, or lokr with algo=lokr"
            " in network_args"
        )
    for key, method in (
        ("controlnet_model_name_or_path", "ControlNet"),
        ("token_string", "textual inversion"),
    ):
        if source.get(key):
            return f"{key}: {method} is not offered"
    return None


def _parse_arguments(value: Any) -> dict[str, str]:
    """Parses a list such as `["algo=lokr", "factor=8"]`, or a text in which these items are
    separated by spaces.
    """
    arguments = value if isinstance(value, list) else str(value or "").split()
    return dict(
        str(argument).strip("\"'").split("=", 1) for argument in arguments if "=" in str(argument)
    )


def _convert_network_args(draft: ConfigDraft, source_key: SourceKey) -> None:
    arguments = _parse_arguments(source_key.value)
    settings = {
        "factor": "adapter.factor",
        "loraplus_lr_ratio": "adapter.plus",
        "loraplus_unet_lr_ratio": "adapter.plus",
    }
    if arguments.get("algo") == "lokr":
        pictures.set_lokr(draft, source_key)
    for name, value in arguments.items():
        if name in settings and not (
            name == "factor" and (arguments.get("algo") != "lokr" or int(value) < 1)
        ):
            draft.set(source_key, settings[name], transforms.parse_number(value))
    if unsupported := [name for name in arguments if name not in settings and name != "algo"]:
        draft.report_not_offered(
            source_key,
            f"{', '.join(unsupported)}: every linear layer of the blocks is adapted; adapter.targets names"
            " others",
        )


def _convert_token_length(draft: ConfigDraft, source_key: SourceKey) -> None:
    if draft.source_values.get("clip_l") or draft.source_values.get("t5xxl"):
        draft.report_no_effect(source_key, "T5 reads the caption: t5xxl_max_token_length")
    else:
        draft.set(source_key, "diffusion.max_text_length", int(source_key.value))


def _convert_samples(draft: ConfigDraft, source_key: SourceKey) -> None:
    file = next(
        (
            candidate
            for candidate in (
                Path(str(source_key.value)),
                Path(draft.folder) / str(source_key.value),
            )
            if candidate.is_file()
        ),
        None,
    )
    if file is None or file.suffix != ".txt":
        draft.report_not_offered(
            source_key,
            "the file is not there, or is no .txt: run.samples takes the prompts themselves",
        )
    else:
        draft.set(
            source_key,
            "run.samples",
            _parse_samples(file.read_text(encoding="utf-8")),
            "with their own settings",
        )


def _parse_samples(text: str) -> list[Any]:
    """Parses prompts, one per line, such as `a dog --n blurry --w 768 --h 768 --d 7 --s 30 --l 5`."""
    samples: list[Any] = []
    for line in text.splitlines():
        prompt, *options = re.split(r"\s--(?=[a-z]+\s)", line.strip())
        if not prompt or prompt.startswith("#"):
            continue
        flags = dict(option.split(" ", 1) for option in options if " " in option)
        sample: dict[str, Any] = {"prompt": prompt.strip()}
        if "n" in flags:
            sample["negative"] = flags["n"].strip()
        if sides := [int(flags[side]) for side in ("w", "h") if side in flags]:
            is_square = len(set(sides)) == 1
            sample["size"] = sides[0] if is_square else f"{sides[0]}x{sides[1]}"
        for flag, key, convert in (
            ("s", "steps", int),
            ("f", "frames", int),
            ("d", "seed", int),
            ("l", "guidance", float),
        ):
            if flag in flags:
                sample[key] = convert(flags[flag])
        samples.append(sample if len(sample) > 1 else sample["prompt"])
    return samples


def _convert_keep_tokens(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `keep_tokens` of the run or of a subset. `keep_tokens` has an effect only if
    `shuffle_caption` is switched on for the same run or subset.
    """
    if transforms.is_enabled(
        draft.source_values.get(
            "shuffle_caption",
            draft.source_values.get(source_key.name.replace("keep_tokens", "shuffle_caption")),
        )
    ):
        draft.set(
            source_key, "images.keep_tags", int(source_key.value), "of all pictures of the run"
        )
    else:
        draft.report_no_effect(source_key, "without shuffle_caption")


def _has_frozen_encoders(draft: ConfigDraft) -> bool:
    return any(
        transforms.is_enabled(draft.source_values.get(key))
        for key in ("network_train_unet_only", "cache_text_encoder_outputs")
    )


def _convert_text_encoder_rate(draft: ConfigDraft, source_key: SourceKey) -> None:
    rates = source_key.value if isinstance(source_key.value, list) else [source_key.value]
    if _has_frozen_encoders(draft) or not any(map(float, rates)):
        draft.report_no_effect(source_key, "the text encoders stay frozen")
    elif draft.source_values.get("clip_l") or draft.source_values.get("t5xxl"):
        draft.report_not_offered(source_key, pictures.NO_TEXT_ENCODER_NOTE)
    else:
        pictures.convert_text_encoder_rate(draft, source_key)


# reason -> the keys for which it holds, separated by spaces
_DATASET_NO_EFFECT = {
    pictures.BUCKETS_NOTE: "min_bucket_reso max_bucket_reso bucket_reso_steps",
    transforms.IRRELEVANT_NOTE: "caption_separator caption_extension",
}
# what to use instead -> the keys of a data set that Isotype does not offer
_DATASET_NOT_OFFERED = {
    "images.crop: windows at random": "face_crop_aug_range",
    "images.trigger: a word before every caption": "caption_prefix caption_suffix",
    "a metadata.jsonl in the folder": "metadata_file in_json",
    "images.masks, where it holds masks": "conditioning_data_dir",
    transforms.NO_SETTING_NOTE: (
        "bucket_no_upscale color_aug caption_dropout_every_n_epochs secondary_separator"
        " keep_tokens_separator"
    ),
}
# key of a data set in the tool's configuration -> the function that translates it
_DATASET_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _DATASET_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _DATASET_NOT_OFFERED),
    "resolution": lambda draft, source_key: pictures.convert_resolution(
        draft, replace(source_key, value=pictures.largest_side(source_key.value))
    ),
    "enable_bucket": transforms.convert_to(
        "images.max_aspect",
        lambda value: 2.0 if transforms.is_enabled(value) else 1.0,
        "aspect buckets",
    ),
    "random_crop": pictures.set_random_crops,
    "shuffle_caption": pictures.set_tag_orders,
    "keep_tokens": _convert_keep_tokens,
    "caption_tag_dropout_rate": transforms.choose_handler(
        lambda draft, _: "images.tag_orders" in draft.settings,
        transforms.convert_to("images.tag_dropout", float, "of all pictures of the run"),
        transforms.report_not_offered("images.tag_dropout, with images.tag_orders"),
    ),
    **transforms.copy_values(images="flip=flip_aug caption_dropout=caption_dropout_rate"),
}
# key of a subset in the tool's configuration -> the function that translates it
_SUBSET_KEYS: dict[str, transforms.Handler] = {
    **_DATASET_KEYS,
    "image_dir": transforms.report_changed("images.train, or images.regularisation with is_reg"),
    "num_repeats": transforms.report_changed("repeats of the source"),
    "class_tokens": transforms.report_changed(
        "caption of the source, where pictures have none of their own"
    ),
    "is_reg": transforms.report_changed("images.regularisation"),
    "batch_size": transforms.convert_count("train.batch_size"),
}
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "its datasets are images.*": "dataset_config",
    "the text encoders stay frozen: adapter.text_encoders is false unless asked": (
        "network_train_unet_only"
    ),
    "checkpoints are always written: run.save_every": "save_state save_state_on_train_end resume",
    pictures.CACHED_NOTE: (
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs"
        " cache_text_encoder_outputs_to_disk vae_batch_size skip_cache_check"
    ),
    transforms.NO_GPU_COUNT_NOTE: "num_processes num_cpu_threads_per_process ddp_*",
    pictures.NOT_UPLOADED_NOTE: "huggingface_*",
    transforms.IRRELEVANT_NOTE: (
        "clip_l clip_g t5xxl ae v2 tokenizer_cache_dir clip_skip"
        " network_module model_prediction_type sample_sampler output_name logging_dir log_*"
        " max_data_loader_n_workers persistent_data_loader_workers xformers sdpa mem_eff_attn"
        " lowvram highvram metadata_* training_comment console_* config_file"
        " wandb_* torch_compile dynamo_* apply_t5_attn_mask prior_* split_mode no_metadata"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "train.clip bounds the gradient": "scale_weight_norms",
    "the base is bf16; precision.preset: nf4-lora takes a quarter": "blocks_to_swap",
    pictures.ADAM_SETTINGS_NOTE: "optimizer_args",
    "train.schedule has no powers and no restarts": (
        "lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_args"
    ),
    "diffusion.noise_offset": (
        "noise_offset_type multires_noise_iterations multires_noise_discount adaptive_noise_scale"
    ),
    "c is constant: diffusion.huber_c": "huber_schedule",
    "images.masks names a folder of masks": "masked_loss",
    "run.sample_every counts steps": "sample_every_n_epochs",
    "run.adapters_every counts steps": "save_every_n_epochs",
    "run.adapters_keep counts adapters": "save_last_n_steps",
    transforms.NO_SETTING_NOTE: (
        "network_train_text_encoder_only ip_noise_gamma ip_noise_gamma_random_strength"
        " weighting_scheme scale_v_pred_loss_like_noise_pred debiased_*"
    ),
}
# the tool's distribution of noise levels -> Isotype's
_TIMESTEPS = {
    "sigmoid": "logit_normal",
    **dict.fromkeys(("shift", "flux_shift"), ("logit_normal", "the shift is diffusion.shift")),
    **dict.fromkeys(("uniform", "sigma"), "uniform"),
}
_LOSSES = dict.fromkeys(("huber", "smooth_l1"), ("huber", "with a constant c"))
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **pictures.DIFFUSERS_KEYS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        images="train=train_data_dir regularisation=reg_data_dir",
        diffusion=(
            "logit_std=sigmoid_scale shift=discrete_flow_shift"
            " max_text_length=t5xxl_max_token_length"
        ),
        adapter="r=network_dim alpha=network_alpha dropout=network_dropout",
        train="epochs=max_train_epochs",
        run="adapters_every=save_every_n_steps sample_every=sample_every_n_steps",
    ),
    pictures.DATASET_PREFIX: pictures.dataset_handler(_SUBSET_KEYS),
    **_DATASET_KEYS,
    "max_token_length": _convert_token_length,
    # adapter
    "network_args": _convert_network_args,
    "network_weights": pictures.set_start,
    "dim_from_weights": transforms.report_no_effect("always so: adapter.start_from"),
    "vae": pictures.set_vae,
    **transforms.same_handler(
        transforms.set_if_enabled(
            "precision.base", "fp8", note="with one scale per channel; kohya uses no scales"
        ),
        "fp8_base fp8_base_unet",
    ),
    **transforms.same_handler(
        pictures.note_precision_key,
        "mixed_precision full_bf16 full_fp16 save_precision no_half_vae",
    ),
    "launcher.mixed_precision": transforms.report_no_effect(
        "the script's own --mixed_precision decides; without it fp32"
    ),
    # steps
    "unet_lr": pictures.convert_rate,
    "text_encoder_lr": _convert_text_encoder_rate,
    "optimizer_type": transforms.convert_optimizer,
    # the objective
    "v_parameterization": transforms.set_if_enabled("diffusion.objective", "v"),
    "loss_type": transforms.convert_choice(
        "diffusion.loss", _LOSSES, "the squared error, the default", fallback="report_no_effect"
    ),
    "huber_c": transforms.require_key(
        "loss_type",
        "huber smooth_l1",
        transforms.convert_number("diffusion.huber_c"),
        "without loss_type: huber",
    ),
    "timestep_sampling": transforms.convert_choice(
        "diffusion.timesteps", _TIMESTEPS, pictures.TIMESTEPS_NOTE
    ),
    "min_timestep": pictures.convert_timestep("diffusion.least_noise"),
    "max_timestep": pictures.convert_timestep("diffusion.most_noise"),
    "prior_loss_weight": transforms.report_changed("weight: {} of images.regularisation"),
    # samples, saving
    "sample_prompts": _convert_samples,
    "save_model_as": transforms.set_constant(
        "run.adapter_format", "comfyui", "comfyui.safetensors beside PEFT's folder"
    ),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds the defaults of kohya's scripts to the new configuration where they differ from the
    defaults of Isotype. Also adds the folders or data sets with the pictures.
    """
    is_full_training = not source.get("network_module") and not source.get("network_dim")
    if not draft.set_adapter_defaults("none" if is_full_training else "lora", 4, 1.0):
        pictures.drop_adapter_files(draft)
    sets_text_encoders = (
        _has_frozen_encoders(draft) or draft.source_values.get("text_encoder_lr") is not None
    )
    # kohya's scripts train the text encoders by default
    if re.search(r"(^|/)(sdxl_)?train_network\b", source.method) and not sets_text_encoders:
        draft.set_default("adapter.text_encoders", True)
    pictures.drop_text_encoders(draft)
    pictures.drop_new_adapter_settings(draft)
    pictures.set_default_preset(
        draft,
        source.get("mixed_precision"),
        half_weights=transforms.is_enabled(source.get("full_bf16")),
    )
    draft.set_defaults(
        pictures.COMMON_DEFAULTS
        | {"train.batch_size": 1, "train.weight_decay": 0.01, "images.resolution": 512}
    )
    if "train.epochs" not in draft.settings:
        draft.set_default("train.steps", 1600)
    weight = source.get("prior_loss_weight") or 1.0
    sources_by_setting: dict[str, list[dict[str, Any]]] = {
        "images.train": [],
        "images.regularisation": [],
    }
    for entry in pictures.collect_datasets(draft):
        if "image_dir" in entry:
            is_prior = transforms.is_enabled(entry.get("is_reg"))
            settings: dict[str, Any] = {
                "caption": entry.get("class_tokens"),
                "repeats": entry.get("num_repeats"),
            }
            settings |= {
                "weight": weight if is_prior else 1.0,
                "resolution": (
                    [pictures.largest_side(entry["resolution"])] if entry.get("resolution") else ()
                ),
            }
            sources_by_setting["images.regularisation" if is_prior else "images.train"].append(
                pictures.picture_source(entry["image_dir"], **settings)
            )
    pictures.set_sources(draft, sources_by_setting)
    for setting, setting_weight in (("images.train", 1.0), ("images.regularisation", weight)):
        if isinstance(folder := draft.settings.get(setting), str):
            pictures.set_sources(
                draft,
                {
                    setting: pictures.read_numbered_folders(
                        folder, Path(draft.folder), weight=setting_weight
                    )
                },
            )
