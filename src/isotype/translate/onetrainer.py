"""OneTrainer: the JSON of a training, with its concepts inside or in the file that it names."""

from __future__ import annotations

from typing import Any

from .draft import Draft, Given
from .picture_tools import DATASET, datasets_of, is_on, preset_of, put_sources, rate, side_of_square
from .source import Source
from .transforms import (
    IRRELEVANT,
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
    to_number,
    when_on,
)

OWN_PRECISION = True
_METHODS = {"LORA": "lora", "FINE_TUNE": "none"}


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    method, peft = str(source.get("training_method") or "LORA"), str(source.get("peft_type") or "LORA")
    if method not in _METHODS:
        return f"training_method: {method} is not offered: {' and '.join(_METHODS)} are"
    if method == "LORA" and peft != "LORA":
        return f"peft_type: {peft} is not offered: adapter.kind is lora"
    return None


def _concept(draft: Draft, given: Given) -> None:
    key = given.name.split(".", 2)[2]
    if handler := _CONCEPT.get(key):
        handler(draft, given)
    elif given.value in (None, "", False, 0, 0.0, [], {}):
        draft.no_effect(given, "switched off")
    else:
        draft.not_offered(given, "isotype import does not know this key of a concept")


def _prompt_source(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word == "filename":
        draft.set(given, "images.captions", "names")
    else:
        draft.changed(given, "a .txt beside the picture" if word == "sample" else "caption of the source")


def _into(what: str) -> Handler:
    return lambda draft, given: draft.changed(given, what)


_CONCEPT: dict[str, Handler] = {
    "path": _into("images.train, or images.regularisation"),
    **each(no_effect("a name"), "name seed type"),
    "enabled": no_effect("concepts that are switched off are left out"),
    "balancing": _into("repeats of the source"),
    "balancing_strategy": no_effect("repeats"),
    "loss_weight": _into("weight, of images.regularisation"),
    "prompt_source": _prompt_source,
    "prompt_path": _into("caption of the source, where a file has it"),
    "enable_tag_shuffling": when_on("images.tag_orders", 8, note="so many random orders of a caption's tags are encoded"),
    "keep_tags_count": lambda draft, given: (
        draft.set(given, "images.keep_tags", int(given.value)) if "images.tag_orders" in draft.settings else draft.no_effect(given, "off")
    ),
    "tag_delimiter": no_effect("commas"),
    "enable_random_flip": when_on("images.flip", True),
    "enable_crop_jitter": when_on("images.crop", 4, note="so many windows of each picture are kept; one is drawn each time"),
    **each(no_effect("nothing is read from folders below, or all of it"), "include_subdirectories image_variations text_variations"),
}


def _samples(draft: Draft, given: Given) -> None:
    found = []
    for entry in given.value if isinstance(given.value, list) else []:
        if not is_on(entry.get("enabled", True)):
            continue
        made: dict[str, Any] = {
            "prompt": str(entry.get("prompt", "")),
            "size": max(int(entry.get("width", 0)), int(entry.get("height", 0))),
        }
        made |= {
            ours: entry[theirs]
            for theirs, ours in (("seed", "seed"), ("diffusion_steps", "steps"), ("cfg_scale", "guidance"))
            if theirs in entry
        }
        if entry.get("negative_prompt"):
            made["negative"] = str(entry["negative_prompt"])
        found.append({key: value for key, value in made.items() if value != 0 or key == "seed"})
    draft.set(given, "run.samples", found, "with their own settings")


def _density(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word in ("LOGIT_NORMAL", "UNIFORM"):
        draft.set(given, "diffusion.timesteps", word.lower())
    else:
        draft.not_offered(given, "diffusion.timesteps: logit_normal, uniform, mode")


def _noising(key: str, target: str) -> Handler:
    return lambda draft, given: (
        draft.set(given, target, number(given.value))
        if str(draft.keys.get("timestep_distribution")) == "LOGIT_NORMAL"
        else draft.no_effect(given, f"{key}: without LOGIT_NORMAL")
    )


def _checkpointing(draft: Draft, given: Given) -> None:
    draft.set(given, "train.gradient_checkpointing", {"OFF": "none", "CPU_OFFLOADED": "layers+offload"}.get(str(given.value), "layers"))


def _every(target: str, unit: str) -> Handler:
    """`sample_after` 10 with `sample_after_unit` STEP."""

    def handler(draft: Draft, given: Given) -> None:
        if str(draft.keys.get(unit)) in ("STEP", "steps"):
            to_count(target)(draft, given)
        elif str(draft.keys.get(unit)) in ("NEVER", "None"):
            draft.no_effect(given, "never")
        else:
            draft.not_offered(given, f"{target} counts steps")

    return handler


_OPTIMIZER = "optimizer.optimizer"
KEYS: dict[str, Handler] = {
    DATASET: _concept,
    "base_model_name": to("model.name", str),
    "model_type": no_effect("the pipeline's own file says what it is"),
    "training_method": to("adapter.kind", _METHODS.get),
    "peft_type": no_effect("PEFT's LoRA"),
    "concept_file_name": no_effect("its concepts are images.*"),
    "resolution": to("images.resolution", side_of_square, "a run has one resolution"),
    "aspect_ratio_bucketing": when_on("images.max_aspect", 2.0, note="aspect buckets"),
    "masked_training": not_offered("images.masks names a folder of masks"),
    **each(not_offered("the loss counts what the mask shows"), "unmasked_probability unmasked_weight normalize_masked_area_loss"),
    # adapter
    "lora_rank": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "dropout_probability": to_number("adapter.dropout"),
    "lora_decompose": not_offered("adapter.dora is for language models"),
    "lora_weight_dtype": no_effect("adapters are fp32"),
    **each(not_offered("adapter.targets names modules"), "layer_filter layer_filter_preset"),
    "lora_model_name": not_offered("adapter.start_from goes on with a PEFT folder"),
    # precision
    **each(changed("decides precision.preset"), "train_dtype fallback_train_dtype weight_dtype output_dtype enable_autocast_cache"),
    # steps
    "learning_rate": rate(_OPTIMIZER),
    "learning_rate_scheduler": schedule_of(
        {"constant": "constant", "linear": "linear", "cosine": "cosine", "cosine_with_restarts": ("cosine", "without restarts")}
    ),
    "learning_rate_warmup_steps": to("train.warmup", number),
    "epochs": to_number("train.epochs"),
    "batch_size": to_count("train.batch_size"),
    "gradient_accumulation_steps": to_count("train.accumulate"),
    "gradient_checkpointing": _checkpointing,
    "clip_grad_norm": to_number("train.clip"),
    "seed": to_count("train.seed"),
    _OPTIMIZER: optimizer,
    "optimizer.weight_decay": to_number("train.weight_decay"),
    "optimizer.beta1": to_number("train.beta1"),
    "optimizer.beta2": to_number("train.beta2"),
    "optimizer.eps": to_number("train.epsilon"),
    "optimizer": no_effect("settings of the optimizer that Isotype does not have"),
    "ema": lambda draft, given: draft.no_effect(given, "off") if given.value == "OFF" else draft.set(
        given, "train.ema", float(draft.keys.get("ema_decay") or 0.999)
    ),
    **each(no_effect("part of train.ema"), "ema_decay ema_update_step_interval"),
    # the objective
    "timestep_distribution": _density,
    "noising_weight": _noising("noising_weight", "diffusion.logit_std"),
    "noising_bias": _noising("noising_bias", "diffusion.logit_mean"),
    "timestep_shift": to_number("diffusion.shift"),
    "dynamic_timestep_shifting": when_on("diffusion.shift", "auto", note="the scheduler's own, by resolution"),
    "min_noising_strength": to_number("diffusion.least_noise"),
    "max_noising_strength": to_number("diffusion.most_noise"),
    "offset_noise_weight": to_number("diffusion.noise_offset"),
    "mse_strength": no_effect("the squared error"),
    **each(not_offered("diffusion.loss: l2, huber"), "mae_strength log_cosh_strength vb_loss_strength huber_strength"),
    **each(not_offered("diffusion.weighting: min_snr"), "loss_weight_fn loss_weight_strength"),
    "loss_scaler": no_effect("none"),
    **each(not_offered("noise is Gaussian"), "perturbation_noise_weight generalized_offset_noise"),
    # samples, saving
    "samples": _samples,
    "sample_after": _every("run.sample_every", "sample_after_unit"),
    "save_every": _every("run.adapters_every", "save_every_unit"),
    **each(no_effect("of the key before it"), "sample_after_unit save_every_unit learning_rate_scaler"),
    "output_model_destination": no_effect("run.folder names the folder"),
    "workspace_dir": to("run.folder", str),
    "output_model_format": lambda draft, given: draft.set(given, "run.adapter_format", "comfyui", "one more file"),
    **each(not_offered("text encoders are not trained"), "embedding* additional_embeddings"),
    **each(no_effect("text encoders are not trained"), "text_encoder* unet* prior* transformer* vae* decoder* effnet*"),
    **each(no_effect("kept: images.cache"), "latent_caching cache_dir clear_cache_before_training only_cache"),
    **each(
        no_effect(IRRELEVANT),
        "__version model_name debug* tensorboard* validation* continue_last_backup backup* rolling_backup* train_device temp_device "
        "dataloader_threads compile enable_async_offloading layer_offload* custom_learning_rate_scheduler scheduler_params frames "
        "save_* sample_definition_file_name samples_to_tensorboard non_ema_sampling sample_* secrets cloud include_train_config "
        "force_* rescale_noise_scheduler_to_zero_terminal_snr align_prop* learning_rate_cycles learning_rate_min_factor quantization* "
        "multi_gpu* device_indexes gradient_reduce* fused_gradient_reduce async_gradient* attention_mechanism",
    ),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """OneTrainer's defaults where they are not Isotype's, and the sources of pictures."""
    draft.default("adapter.kind", "lora")
    if not draft.without_adapter():
        draft.default("adapter.r", 16)
        draft.default("adapter.alpha", 1.0)
    else:
        for key in ("run.adapters_every", "run.adapter_format"):
            draft.settings.pop(key, None)
    preset_of(draft, source.get("train_dtype") or "bf16", full=str(source.get("weight_dtype")) == "BFLOAT_16")
    draft.default("train.schedule", "constant")
    draft.default("train.warmup", 200)
    draft.default("images.eval_split", 0.0)
    sides: dict[str, list[dict[str, Any]]] = {"images.train": [], "images.regularisation": []}
    for entry in datasets_of(draft):
        if not entry.get("path") or not is_on(entry.get("enabled", True)):
            continue
        made: dict[str, Any] = {"name": str(entry["path"])}
        if float(entry.get("balancing") or 1) > 1:
            made["repeats"] = round(float(entry["balancing"]))
        prior = str(entry.get("type")) == "PRIOR_PREDICTION"
        sides["images.regularisation" if prior else "images.train"].append(made)
    for side, sources in sides.items():
        put_sources(draft, side, sources)
