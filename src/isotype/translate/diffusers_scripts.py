"""diffusers' own example scripts: `train_dreambooth_lora_flux.py` and its like, from the shell script that starts one."""

from __future__ import annotations

from typing import Any

from .draft import Draft, Given
from .picture_tools import is_on, min_snr, preset_of, rate
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
    trackers,
)

OWN_PRECISION = True


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    if is_on(source.get("train_text_encoder")) or is_on(source.get("train_text_encoder_ti")):
        return "train_text_encoder: text encoders are not trained: they are freed before the denoiser is loaded"
    return None


def _weighting(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word in ("logit_normal", "mode"):
        draft.set(given, "diffusion.timesteps", word)
    elif word == "none":
        draft.set(given, "diffusion.timesteps", "uniform")
    else:
        draft.not_offered(given, "diffusion.timesteps: logit_normal, uniform, mode; the loss counts every level alike")


def _with(word: str, target: str) -> Handler:
    """A number that acts with one weighting scheme only."""
    return lambda draft, given: (
        draft.set(given, target, number(given.value))
        if str(draft.keys.get("weighting_scheme")) == word
        else draft.no_effect(given, f"without weighting_scheme: {word}")
    )


def _layers(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.targets", [part.strip() for part in str(given.value).split(",")])


def _epochs(draft: Draft, given: Given) -> None:
    if draft.keys.get("max_train_steps"):
        draft.no_effect(given, "max_train_steps decides")
    else:
        draft.set(given, "train.epochs", float(given.value))


KEYS: dict[str, Handler] = {
    "pretrained_model_name_or_path": to("model.name", str),
    "revision": to("model.revision"),
    **each(no_effect("the pipeline's own files"), "variant pretrained_vae_model_name_or_path vae_path"),
    "instance_data_dir": to("images.train", str),
    "train_data_dir": to("images.train", str),
    "dataset_name": not_offered("download it, and name its folder in images.train"),
    **each(not_offered("images.columns, and a file of rows"), "dataset_config_name image_column caption_column"),
    "instance_prompt": no_effect("the caption of images.train"),
    "validation_prompt": lambda draft, given: draft.set(given, "run.samples", [str(given.value)]),
    "num_validation_images": not_offered("each prompt gives one picture: name it twice in run.samples"),
    "validation_epochs": not_offered("run.sample_every counts steps"),
    **each(no_effect("images.regularisation"), "class_data_dir class_prompt with_prior_preservation prior_loss_weight"),
    "num_class_images": not_offered("class pictures are not drawn by the run: images.regularisation names a folder of them"),
    "sample_batch_size": no_effect("of class pictures"),
    "repeats": lambda draft, given: draft.changed(given, f"repeats: {given.value} of images.train"),
    "resolution": to_count("images.resolution"),
    "center_crop": no_effect("the default: images.crop: center"),
    "random_flip": to_either("images.flip", True, False),
    "aspect_ratio_buckets": not_offered("images.max_aspect: 2 puts pictures into buckets by their shape"),
    "caption_dropout": to_number("images.caption_dropout"),
    # adapter
    "rank": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": to_number("adapter.dropout"),
    "lora_layers": _layers,
    "use_dora": not_offered("adapter.dora is for language models"),
    # precision
    **each(
        changed("one of the keys that decide precision.preset"),
        "mixed_precision allow_tf32 upcast_before_saving prior_generation_precision",
    ),
    "bnb_quantization_config_path": not_offered("precision.preset: nf4-lora quantises the base"),
    # steps
    "learning_rate": rate("optimizer"),
    "text_encoder_lr": no_effect("text encoders are not trained"),
    "scale_lr": not_offered("train.learning_rate is the rate of a step, whatever its rows"),
    "optimizer": optimizer,
    "use_8bit_adam": lambda draft, given: draft.set(given, "train.optimizer", "adamw8bit") if is_on(given.value) else None,
    **each(not_offered("of Prodigy"), "prodigy_*"),
    "adam_beta1": to_number("train.beta1"),
    "adam_beta2": to_number("train.beta2"),
    "adam_weight_decay": to_number("train.weight_decay"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "train_batch_size": to_count("train.batch_size"),
    "gradient_accumulation_steps": to_count("train.accumulate"),
    "gradient_checkpointing": to_either("train.gradient_checkpointing", "layers", "none"),
    "max_train_steps": to_count("train.steps"),
    "num_train_epochs": _epochs,
    "lr_scheduler": schedule_of({**SCHEDULES, "cosine_with_restarts": ("cosine", "without restarts")}),
    **each(not_offered("train.schedule has no powers and no restarts"), "lr_num_cycles lr_power"),
    "lr_warmup_steps": to("train.warmup", number),
    "seed": to_count("train.seed"),
    # the objective
    "guidance_scale": to_number("diffusion.guidance"),
    "weighting_scheme": _weighting,
    "logit_mean": _with("logit_normal", "diffusion.logit_mean"),
    "logit_std": _with("logit_normal", "diffusion.logit_std"),
    "mode_scale": _with("mode", "diffusion.mode_scale"),
    "snr_gamma": min_snr,
    "noise_offset": to_number("diffusion.noise_offset"),
    "prediction_type": no_effect("the scheduler's file says what is predicted"),
    "precondition_outputs": no_effect("SD3's velocity"),
    "max_sequence_length": to_count("diffusion.max_text_length"),
    "use_ema": lambda draft, given: draft.set(given, "train.ema", 0.999) if is_on(given.value) else None,
    # saving, machine
    "output_dir": to("run.folder"),
    "checkpointing_steps": to_count("run.save_every"),
    "checkpoints_total_limit": to_count("run.keep"),
    "report_to": trackers,
    "resume_from_checkpoint": not_offered("isotype train --resume RUN"),
    **each(no_effect("latents and text are always computed once and kept: images.cache"), "cache_latents cache_dir offload"),
    **each(no_effect("nothing is uploaded"), "push_to_hub hub_*"),
    **each(
        no_effect(IRRELEVANT), "logging_dir dataloader_num_workers local_rank enable_xformers_memory_efficient_attention set_grads_to_none"
    ),
    **each(no_effect(GPUS), "num_processes"),
}


def finish(draft: Draft, source: Source) -> None:
    """The scripts' defaults where they are not Isotype's."""
    lora = "lora" in source.method or source.get("rank") is not None
    draft.default("adapter.kind", "lora" if lora else "none")
    if not draft.without_adapter():
        draft.default("adapter.r", 4)
        draft.default("adapter.alpha", float(draft.settings["adapter.r"]))
    preset_of(draft, source.get("mixed_precision"))
    draft.default("train.schedule", "constant")
    draft.default("train.warmup", 0)
    draft.default("train.batch_size", 4)
    draft.default("train.weight_decay", 1e-4 if lora else 1e-2)
    draft.default("images.resolution", 512)
    draft.default("images.eval_split", 0.0)
    if source.get("weighting_scheme") is None and any(word in source.method for word in ("flux", "qwen", "z_image")):
        draft.default("diffusion.timesteps", "uniform")  # weighting_scheme none
        draft.default("diffusion.shift", 1.0)
    if "flux" in source.method:
        draft.default("diffusion.guidance", 3.5)
    if "train.epochs" not in draft.settings:
        draft.default("train.steps", 500)
    _sources(draft, source)


def _sources(draft: Draft, source: Source) -> None:
    if "images.train" in draft.settings:
        made: dict[str, Any] = {"name": draft.settings["images.train"]}
        if prompt := source.get("instance_prompt"):
            made["caption"] = str(prompt)
        if int(str(source.get("repeats") or 1)) > 1:
            made["repeats"] = int(str(source.get("repeats")))
        draft.settings["images.train"] = [made] if len(made) > 1 else made["name"]
    if is_on(source.get("with_prior_preservation")) and source.get("class_data_dir"):
        prior: dict[str, Any] = {"name": str(source.get("class_data_dir"))}
        if source.get("class_prompt"):
            prior["caption"] = str(source.get("class_prompt"))
        if (weight := source.get("prior_loss_weight")) is not None and float(str(weight)) != 1.0:
            prior["weight"] = float(str(weight))
        draft.settings["images.regularisation"] = [prior] if len(prior) > 1 else prior["name"]
