"""Translates a JSON file of OneTrainer to an Isotype configuration. The datasets, which OneTrainer
calls concepts, are in the same file or in a file that this file names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey

# OneTrainer's training method -> `adapter.kind`
_ADAPTER_KINDS = {"LORA": "lora", "FINE_TUNE": "none"}


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    method = str(source.get("training_method") or "LORA")
    peft = str(source.get("peft_type") or "LORA")
    if method not in _ADAPTER_KINDS:
        return f"training_method: {method} is not offered: {' and '.join(_ADAPTER_KINDS)} are"
    if method == "LORA" and peft not in ("LORA", "LOKR"):
        return f"peft_type: {peft} is not offered: adapter.kind is lora or lokr"
    return None


# reason -> the keys of a concept that have no effect for this reason
_CONCEPT_NO_EFFECT = {
    transforms.IRRELEVANT_NOTE: (
        "name seed type enabled balancing_strategy tag_delimiter include_subdirectories"
        " image_variations text_variations"
    ),
}
# key of a concept in the tool's configuration -> the function that translates it
_CONCEPT_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _CONCEPT_NO_EFFECT),
    "path": transforms.report_changed("images.train, or images.regularisation"),
    "balancing": transforms.report_changed("repeats of the source"),
    "loss_weight": transforms.report_changed("weight, of images.regularisation"),
    "prompt_source": transforms.convert_choice(
        "images.captions",
        {"filename": "names"},
        "a .txt beside the picture, or caption of the source",
        fallback="report_changed",
    ),
    "prompt_path": transforms.report_changed("caption of the source, where a file has it"),
    "enable_tag_shuffling": pictures.set_tag_orders,
    "keep_tags_count": transforms.choose_handler(
        lambda draft, _: "images.tag_orders" in draft.settings,
        transforms.convert_number("images.keep_tags"),
        transforms.report_no_effect("off"),
    ),
    "enable_random_flip": transforms.set_if_enabled("images.flip", True),
    "enable_crop_jitter": pictures.set_random_crops,
}


def _convert_samples(draft: ConfigDraft, source_key: SourceKey) -> None:
    samples = []
    for entry in source_key.value if isinstance(source_key.value, list) else []:
        if not transforms.is_enabled(entry.get("enabled", True)):
            continue
        size = max(int(entry.get("width", 0)), int(entry.get("height", 0)))
        sample: dict[str, Any] = {"prompt": str(entry.get("prompt", "")), "size": size}
        names = (("seed", "seed"), ("diffusion_steps", "steps"), ("cfg_scale", "guidance"))
        sample |= {
            setting: entry[source_name] for source_name, setting in names if source_name in entry
        }
        if entry.get("negative_prompt"):
            sample["negative"] = str(entry["negative_prompt"])
        samples.append({key: value for key, value in sample.items() if value != 0 or key == "seed"})
    draft.set(source_key, "run.samples", samples, "with their own settings")


# model_type -> number of CLIP text encoders
_CLIP_ENCODERS = {
    "stable_diffusion_15": 1,
    "stable_diffusion_20": 1,
    "stable_diffusion_21": 1,
    "stable_diffusion_xl_10_base": 2,
}


def _convert_text_encoder(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `text_encoder.train`, `text_encoder_2.learning_rate` and similar keys. Isotype can
    only train all text encoders of a model, or none of them.
    """
    encoders = ("text_encoder", "text_encoder_2")[
        : _CLIP_ENCODERS.get(draft.lowercase_value("model_type"), 0)
    ]
    encoder_name, _, key = source_key.name.partition(".")
    if (
        not transforms.is_enabled(draft.source_values.get(f"{encoder_name}.train"))
        or source_key.value is None
    ):
        draft.report_no_effect(
            source_key, "not trained" if source_key.value is not None else "learning_rate"
        )
    elif encoder_name not in encoders or {
        draft.lowercase_value("training_method"),
        draft.lowercase_value("peft_type"),
    } - {
        "",
        "lora",
    }:
        draft.report_not_offered(source_key, pictures.NO_TEXT_ENCODER_NOTE)
    elif not all(
        transforms.is_enabled(draft.source_values.get(f"{encoder}.train")) for encoder in encoders
    ):
        draft.report_not_offered(source_key, "adapter.text_encoders trains both")
    elif key == "train":
        draft.set(source_key, "adapter.text_encoders", True)
    else:
        rates = [
            draft.source_values.get(f"{encoder}.learning_rate")
            or draft.source_values.get("learning_rate")
            for encoder in encoders
        ]
        pictures.convert_text_encoder_rate(draft, replace(source_key, value=rates))


def _interval_handler(target: str, unit_key: str) -> transforms.Handler:
    """Returns a handler for an interval and its unit, such as `sample_after` 10 with
    `sample_after_unit` STEP.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if str(draft.source_values.get(unit_key)) in ("STEP", "steps"):
            transforms.convert_count(target)(draft, source_key)
        elif str(draft.source_values.get(unit_key)) in ("NEVER", "None"):
            draft.report_no_effect(source_key, "never")
        else:
            draft.report_not_offered(source_key, f"{target} counts steps")

    return handler


# OneTrainer's value -> `train.gradient_checkpointing`
_CHECKPOINTING = {"OFF": "none", "CPU_OFFLOADED": "layers+offload"}
_NOT_LOGIT_NORMAL = "without LOGIT_NORMAL"
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "its concepts are images.*": "concept_file_name",
    "part of train.ema": "ema_decay ema_update_step_interval",
    "run.folder names the folder": "output_model_destination",
    pictures.NO_TEXT_ENCODER_NOTE: "text_encoder* unet* prior* transformer* vae* decoder* effnet*",
    "kept: images.cache": "latent_caching cache_dir clear_cache_before_training only_cache",
    transforms.IRRELEVANT_NOTE: (
        "model_type lora_weight_dtype optimizer mse_strength loss_scaler sample_after_unit"
        " save_every_unit learning_rate_scaler __version model_name debug* tensorboard* validation*"
        " continue_last_backup backup* rolling_backup* train_device temp_device dataloader_threads"
        " compile enable_async_offloading layer_offload* custom_learning_rate_scheduler"
        " scheduler_params frames save_* sample_definition_file_name samples_to_tensorboard"
        " non_ema_sampling sample_* secrets cloud include_train_config force_*"
        " rescale_noise_scheduler_to_zero_terminal_snr align_prop* learning_rate_cycles"
        " learning_rate_min_factor quantization* multi_gpu* device_indexes gradient_reduce*"
        " fused_gradient_reduce async_gradient* attention_mechanism"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "images.masks names a folder of masks": "masked_training",
    "adapter.targets names modules": "layer_filter layer_filter_preset",
    "diffusion.loss: l2, huber": "mae_strength log_cosh_strength vb_loss_strength huber_strength",
    "diffusion.weighting: min_snr": "loss_weight_fn loss_weight_strength",
    pictures.NO_TEXT_ENCODER_NOTE: "embedding* additional_embeddings",
    transforms.NO_SETTING_NOTE: (
        "unmasked_probability unmasked_weight normalize_masked_area_loss lora_decompose_output_axis"
        " lora_decompose_norm_epsilon perturbation_noise_weight generalized_offset_noise"
    ),
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        model="name=base_model_name",
        diffusion=(
            "least_noise=min_noising_strength most_noise=max_noising_strength"
            " noise_offset=offset_noise_weight shift=timestep_shift"
        ),
        adapter="r=lora_rank alpha=lora_alpha dropout=dropout_probability",
        train=(
            "epochs batch_size accumulate=gradient_accumulation_steps"
            " warmup=learning_rate_warmup_steps weight_decay=optimizer.weight_decay"
            " beta1=optimizer.beta1 beta2=optimizer.beta2 epsilon=optimizer.eps clip=clip_grad_norm"
            " seed"
        ),
        run="folder=workspace_dir",
    ),
    pictures.DATASET_PREFIX: pictures.dataset_handler(_CONCEPT_KEYS, "concept"),
    "training_method": transforms.convert_to("adapter.kind", _ADAPTER_KINDS.get),
    "resolution": pictures.convert_resolution,
    "aspect_ratio_bucketing": transforms.set_if_enabled(
        "images.max_aspect", 2.0, note="aspect buckets"
    ),
    # adapter
    "peft_type": transforms.choose_handler(
        lambda _, source_key: str(source_key.value) == "LOKR",
        pictures.set_lokr,
        transforms.report_no_effect(pictures.PEFT_LORA_NOTE),
    ),
    **transforms.same_handler(
        _convert_text_encoder,
        "text_encoder.train text_encoder.learning_rate text_encoder_2.train"
        " text_encoder_2.learning_rate",
    ),
    "lora_model_name": pictures.set_start,
    "vae.model_name": pictures.set_vae,
    "lora_decompose": transforms.set_if_enabled("adapter.dora", True),
    # precision
    **transforms.same_handler(
        transforms.report_changed("decides precision.preset"),
        "train_dtype fallback_train_dtype weight_dtype output_dtype enable_autocast_cache",
    ),
    # steps
    "learning_rate": pictures.convert_rate,
    "learning_rate_scheduler": pictures.DIFFUSERS_KEYS["lr_scheduler"],
    "gradient_checkpointing": transforms.convert_to(
        "train.gradient_checkpointing", lambda value: _CHECKPOINTING.get(str(value), "layers")
    ),
    "optimizer.optimizer": transforms.convert_optimizer,
    "ema": transforms.choose_handler(
        lambda _, source_key: source_key.value == "OFF",
        transforms.report_no_effect("off"),
        lambda draft, source_key: draft.set(
            source_key, "train.ema", float(draft.source_values.get("ema_decay") or 0.999)
        ),
    ),
    # the objective
    "timestep_distribution": transforms.convert_choice(
        "diffusion.timesteps",
        {"logit_normal": "logit_normal", "uniform": "uniform"},
        pictures.TIMESTEPS_NOTE,
    ),
    "noising_weight": transforms.require_key(
        "timestep_distribution",
        "logit_normal",
        transforms.convert_number("diffusion.logit_std"),
        _NOT_LOGIT_NORMAL,
    ),
    "noising_bias": transforms.require_key(
        "timestep_distribution",
        "logit_normal",
        transforms.convert_number("diffusion.logit_mean"),
        _NOT_LOGIT_NORMAL,
    ),
    "dynamic_timestep_shifting": transforms.set_if_enabled(
        "diffusion.shift", "auto", note="the scheduler's own, by resolution"
    ),
    # samples, saving
    "samples": _convert_samples,
    "sample_after": _interval_handler("run.sample_every", "sample_after_unit"),
    "save_every": _interval_handler("run.adapters_every", "save_every_unit"),
    "output_model_format": transforms.set_constant(
        "run.adapter_format", "comfyui", "one more file"
    ),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds OneTrainer's defaults to the new configuration where they differ from the defaults of
    Isotype. Also adds the folders or data sets with the pictures.
    """
    if not draft.set_adapter_defaults("lora", 16, 1.0):
        pictures.drop_adapter_files(draft)
    pictures.drop_new_adapter_settings(draft)
    pictures.set_default_preset(
        draft,
        source.get("train_dtype") or "bf16",
        half_weights=str(source.get("weight_dtype")) == "BFLOAT_16",
    )
    draft.set_defaults(pictures.COMMON_DEFAULTS | {"train.warmup": 200})
    sources_by_setting: dict[str, list[dict[str, Any]]] = {
        "images.train": [],
        "images.regularisation": [],
    }
    for entry in pictures.collect_datasets(draft):
        if entry.get("path") and transforms.is_enabled(entry.get("enabled", True)):
            if str(entry.get("type")) == "PRIOR_PREDICTION":
                setting = "images.regularisation"
            else:
                setting = "images.train"
            sizes = (
                pictures.parse_resolutions(source.get("resolution"))
                if source.get("resolution")
                else ()
            )
            sources_by_setting[setting].append(
                pictures.picture_source(
                    entry["path"], repeats=entry.get("balancing"), resolution=sizes
                )
            )
    pictures.set_sources(draft, sources_by_setting)
