"""kohya's sd-scripts: command lines, TOML of a run, TOML of its datasets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .draft import Draft, Given
from .picture_tools import (
    DATASET,
    datasets_of,
    is_on,
    min_snr,
    numbered_folders,
    preset_of,
    put_sources,
    rate,
    sample_lines,
    side_of_square,
)
from .source import Source
from .transforms import (
    GPUS,
    IRRELEVANT,
    SCHEDULES,
    Handler,
    changed,
    each,
    no_effect,
    not_offered,
    number,
    optimizer,
    schedule_of,
    to,
    to_count,
    to_either,
    to_number,
    to_truth,
    trackers,
    when_on,
)

OWN_PRECISION = True
_SQUARE = "a run has one resolution, the side of a square"
_CACHED = "latents and text are always computed once and kept: images.cache"


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    module = str(source.get("network_module") or "")
    if module and not re.search(r"(^|\.)lora", module):
        return f"network_module: {module} is not offered: adapter.kind is lora"
    for key, why in (("controlnet_model_name_or_path", "ControlNet"), ("token_string", "textual inversion")):
        if source.get(key):
            return f"{key}: {why} is not offered"
    return None


def _samples(draft: Draft, given: Given) -> None:
    file = next((found for found in (Path(str(given.value)), Path(draft.folder) / str(given.value)) if found.is_file()), None)
    if file is None or file.suffix != ".txt":
        draft.not_offered(given, "the file is not there, or is no .txt: run.samples takes the prompts themselves")
    else:
        draft.set(given, "run.samples", sample_lines(file.read_text(encoding="utf-8")), "with their own settings")


def _steps(key: str) -> Handler:
    """min_timestep, max_timestep: of 1000."""
    return lambda draft, given: draft.set(given, key, float(given.value) / 1000, "a share of 1000 timesteps")


def _sampling(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word in ("sigmoid", "shift", "flux_shift"):
        draft.set(given, "diffusion.timesteps", "logit_normal", "" if word == "sigmoid" else "the shift is diffusion.shift")
    elif word in ("uniform", "sigma"):
        draft.set(given, "diffusion.timesteps", "uniform")
    else:
        draft.not_offered(given, "diffusion.timesteps: logit_normal, uniform, mode")


def _loss(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word in ("huber", "smooth_l1"):
        draft.set(given, "diffusion.loss", "huber", "with a constant c")
    else:
        draft.no_effect(given, "the squared error, the default")


def _dataset(draft: Draft, given: Given) -> None:
    """A key of one subset; `finish` makes the sources."""
    key = given.name.split(".", 2)[2]
    if handler := _SUBSET.get(key):
        handler(draft, given)
    elif not given.value:
        draft.no_effect(given, "switched off")
    else:
        draft.not_offered(given, "isotype import does not know this key of a dataset")


def _into(what: str) -> Handler:
    return lambda draft, given: draft.changed(given, what)


_ALL = "of all pictures of the run"
_PICTURES: dict[str, Handler] = {
    "resolution": to("images.resolution", side_of_square, _SQUARE),
    "enable_bucket": lambda draft, given: draft.set(given, "images.max_aspect", 2.0 if is_on(given.value) else 1.0, "aspect buckets"),
    **each(no_effect("buckets follow images.resolution and images.max_aspect"), "min_bucket_reso max_bucket_reso bucket_reso_steps"),
    "bucket_no_upscale": not_offered("pictures are scaled to their bucket, smaller ones too"),
    "flip_aug": to_truth("images.flip"),
    "random_crop": when_on("images.crop", 4, note="so many windows of each picture are kept; one is drawn each time"),
    "color_aug": not_offered("colours stay as they are"),
    "face_crop_aug_range": not_offered("images.crop: windows at random"),
    "shuffle_caption": when_on("images.tag_orders", 8, note="so many random orders of a caption's tags are encoded"),
    "keep_tokens": lambda draft, given: (
        draft.set(given, "images.keep_tags", int(given.value), _ALL)
        if is_on(draft.keys.get("shuffle_caption", draft.keys.get(given.name.replace("keep_tokens", "shuffle_caption"))))
        else draft.no_effect(given, "without shuffle_caption")
    ),
    "caption_tag_dropout_rate": lambda draft, given: (
        draft.set(given, "images.tag_dropout", float(given.value), _ALL)
        if "images.tag_orders" in draft.settings
        else draft.not_offered(given, "images.tag_dropout, with images.tag_orders")
    ),
    "caption_dropout_rate": to_number("images.caption_dropout"),
    **each(not_offered("a picture has one caption a line"), "caption_dropout_every_n_epochs secondary_separator keep_tokens_separator"),
    **each(not_offered("images.trigger: a word before every caption"), "caption_prefix caption_suffix"),
    "caption_separator": no_effect("commas"),
    "caption_extension": no_effect(".txt beside the picture, or .caption"),
}
_SUBSET: dict[str, Handler] = {
    **_PICTURES,
    "image_dir": _into("images.train, or images.regularisation with is_reg"),
    "num_repeats": _into("repeats of the source"),
    "class_tokens": _into("caption of the source, where pictures have none of their own"),
    "is_reg": _into("images.regularisation"),
    "metadata_file": not_offered("a metadata.jsonl in the folder"),
    "batch_size": to_count("train.batch_size"),
    "conditioning_data_dir": not_offered("images.masks, where it holds masks"),
}

KEYS: dict[str, Handler] = {
    DATASET: _dataset,
    **_PICTURES,
    "pretrained_model_name_or_path": to("model.name", str),
    **each(no_effect("part of the pipeline's folder"), "clip_l clip_g t5xxl ae vae v2 tokenizer_cache_dir clip_skip"),
    "v_parameterization": no_effect("the scheduler's file says what is predicted"),
    "train_data_dir": to("images.train", str),
    "reg_data_dir": to("images.regularisation", str),
    "dataset_config": no_effect("its datasets are images.*"),
    "in_json": not_offered("a metadata.jsonl in the folder"),
    # adapter
    "network_module": no_effect("PEFT's LoRA"),
    "network_dim": to_count("adapter.r"),
    "network_alpha": to_number("adapter.alpha"),
    "network_dropout": to_number("adapter.dropout"),
    "network_weights": not_offered("adapter.start_from goes on with a PEFT folder"),
    "network_args": not_offered("adapter.targets names modules; every linear layer of the blocks is adapted"),
    "network_train_unet_only": no_effect("the denoiser is what trains"),
    "network_train_text_encoder_only": not_offered("text encoders are not trained"),
    "text_encoder_lr": not_offered("text encoders are not trained"),
    "scale_weight_norms": not_offered("train.clip bounds the gradient"),
    # precision
    **each(changed("one of the keys that decide precision.preset"), "mixed_precision full_bf16 full_fp16 save_precision no_half_vae"),
    **each(not_offered("the base is bf16; precision.preset: nf4-lora takes a quarter"), "fp8_base fp8_base_unet blocks_to_swap"),
    # steps
    "learning_rate": rate("optimizer_type"),
    "unet_lr": rate("optimizer_type"),
    "optimizer_type": optimizer,
    "optimizer_args": not_offered("train.beta1, train.beta2, train.epsilon, train.weight_decay"),
    "lr_scheduler": schedule_of({**SCHEDULES, "cosine_with_restarts": ("cosine", "without restarts")}),
    **each(not_offered("train.schedule has no powers and no restarts"), "lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_args"),
    "lr_warmup_steps": to("train.warmup", number),
    "max_train_steps": to_count("train.steps"),
    "max_train_epochs": to("train.epochs", float),
    "train_batch_size": to_count("train.batch_size"),
    "gradient_accumulation_steps": to_count("train.accumulate"),
    "gradient_checkpointing": to_either("train.gradient_checkpointing", "layers", "none"),
    "max_grad_norm": to_number("train.clip"),
    "seed": to_count("train.seed"),
    # the objective
    "min_snr_gamma": min_snr,
    "noise_offset": to_number("diffusion.noise_offset"),
    **each(
        not_offered("diffusion.noise_offset"), "noise_offset_type multires_noise_iterations multires_noise_discount adaptive_noise_scale"
    ),
    **each(not_offered("noise is Gaussian"), "ip_noise_gamma ip_noise_gamma_random_strength"),
    "loss_type": _loss,
    "huber_c": lambda draft, given: (
        draft.set(given, "diffusion.huber_c", float(given.value))
        if str(draft.keys.get("loss_type")).lower() in ("huber", "smooth_l1")
        else draft.no_effect(given, "without loss_type: huber")
    ),
    "huber_schedule": not_offered("c is constant: diffusion.huber_c"),
    "timestep_sampling": _sampling,
    "sigmoid_scale": to_number("diffusion.logit_std"),
    "discrete_flow_shift": to_number("diffusion.shift"),
    "guidance_scale": to_number("diffusion.guidance"),
    "min_timestep": _steps("diffusion.least_noise"),
    "max_timestep": _steps("diffusion.most_noise"),
    "prior_loss_weight": lambda draft, given: draft.changed(given, f"weight: {given.value} of images.regularisation"),
    **each(
        not_offered("the loss counts every level alike, or by min_snr"), "weighting_scheme scale_v_pred_loss_like_noise_pred debiased_*"
    ),
    "model_prediction_type": no_effect("raw: the velocity"),
    "masked_loss": not_offered("images.masks names a folder of masks"),
    # samples, saving
    "sample_prompts": _samples,
    "sample_every_n_steps": to_count("run.sample_every"),
    "sample_every_n_epochs": not_offered("run.sample_every counts steps"),
    "sample_sampler": no_effect("the pipeline's own scheduler"),
    "output_dir": to("run.folder"),
    "output_name": no_effect("the run's folder is the name"),
    "save_every_n_steps": to_count("run.adapters_every"),
    "save_every_n_epochs": not_offered("run.adapters_every counts steps"),
    "save_last_n_steps": not_offered("run.adapters_keep counts adapters"),
    "save_model_as": lambda draft, given: draft.set(given, "run.adapter_format", "comfyui", "comfyui.safetensors beside PEFT's folder"),
    **each(no_effect("checkpoints are always written: run.save_every"), "save_state save_state_on_train_end resume"),
    "log_with": trackers,
    **each(
        no_effect(_CACHED),
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk vae_batch_size skip_cache_check",
    ),
    **each(
        no_effect(IRRELEVANT),
        "logging_dir log_* max_data_loader_n_workers persistent_data_loader_workers xformers sdpa mem_eff_attn lowvram highvram "
        "max_token_length metadata_* training_comment console_* config_file wandb_* torch_compile dynamo_* apply_t5_attn_mask "
        "prior_* split_mode no_metadata",
    ),
    **each(no_effect(GPUS), "num_processes num_cpu_threads_per_process ddp_*"),
    **each(no_effect("nothing is uploaded"), "huggingface_*"),
}


def finish(draft: Draft, source: Source) -> None:
    """kohya's defaults where they are not Isotype's, and the sources of pictures."""
    whole = not source.get("network_module") and not source.get("network_dim")
    draft.default("adapter.kind", "none" if whole else "lora")
    if not draft.without_adapter():
        draft.default("adapter.r", 4)
        draft.default("adapter.alpha", 1.0)
    preset_of(draft, source.get("mixed_precision"), full=is_on(source.get("full_bf16")))
    draft.default("train.schedule", "constant")
    draft.default("train.warmup", 0)
    draft.default("train.batch_size", 1)
    draft.default("train.weight_decay", 0.01)
    draft.default("images.resolution", 512)
    draft.default("images.eval_split", 0.0)
    if "train.epochs" not in draft.settings:
        draft.default("train.steps", 1600)
    if whole:
        for key in ("run.adapters_every", "run.adapter_format"):
            draft.settings.pop(key, None)
    weight = float(source.get("prior_loss_weight") or 1.0)  # type: ignore[arg-type]  # a number, or text of one
    _sources(draft, weight)


def _sources(draft: Draft, weight: float) -> None:
    train: list[dict[str, Any]] = []
    prior: list[dict[str, Any]] = []
    for entry in datasets_of(draft):
        if "image_dir" not in entry:
            continue
        made: dict[str, Any] = {"name": str(entry["image_dir"])}
        if entry.get("class_tokens"):
            made["caption"] = str(entry["class_tokens"])
        if int(entry.get("num_repeats", 1)) > 1:
            made["repeats"] = int(entry["num_repeats"])
        (prior if is_on(entry.get("is_reg")) else train).append(made)
    put_sources(draft, "images.train", train)
    if prior and weight != 1.0:
        prior = [{**one, "weight": weight} for one in prior]
    put_sources(draft, "images.regularisation", prior)
    numbered: Callable[[str], list[dict[str, Any]]] = lambda key: numbered_folders(str(draft.settings[key]), Path(draft.folder))  # noqa: E731
    for key in ("images.train", "images.regularisation"):
        if isinstance(draft.settings.get(key), str) and (found := numbered(key)):
            extra = {"weight": weight} if key == "images.regularisation" and weight != 1.0 else {}
            put_sources(draft, key, [{**one, **extra} for one in found])
