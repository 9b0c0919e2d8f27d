# ruff: noqa: E501  a table: one row, one key
"""SimpleTuner: config.env, JSON and TOML. Its dataset file is translated by `simpletuner_data`."""

from __future__ import annotations

from .account import Draft, Given, Handler, changed, no_effect, not_offered, number, precision, to, to_count, to_number, truth
from .simpletuner_data import dataset_key, finish_data, pixels
from .simpletuner_file import DATASET
from .source import Source
from .words import trackers

DATA = "images.train"  # the key that names the data
FAMILIES = {"flux", "sd3", "sdxl", "pixart_sigma"}
VIDEO = {
    "wan",
    "wan_s2v",
    "ltxvideo",
    "ltxvideo2",
    "hunyuanvideo",
    "sanavideo",
    "cosmos",
    "cosmos2image",
    "cosmos3",
    "kandinsky5-video",
    "longcat_video",
    "mochi",
}
HUB = {  # family and flavour -> the model that SimpleTuner takes where none is named
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev", ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("sd3", "medium"): "stabilityai/stable-diffusion-3.5-medium", ("sd3", "large"): "stabilityai/stable-diffusion-3.5-large",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
}  # fmt: skip
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_STOPPED_BY_NOTHING = {"CF020", "CF029"}  # what the first asks for is what the result has; the second is how their own reader differs


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    said = {given.name: given.value for given in source.keys}
    family = str(said.get("model_family") or "").lower()
    kind = str(said.get("model_type") or "").lower()
    base = str(said.get("base_model_precision") or "no_change").lower()
    place = {given.name: f"line {given.line}: {given.written}" for given in source.keys}
    if (
        "controlnet" in kind
        or truth(said.get("controlnet", False))
        or truth(said.get("control", False))
        or truth(said.get("controlnet_model_name_or_path") or False)
    ):
        return f"{place.get('controlnet', place.get('control', place.get('model_type', '')))}: ControlNet is not offered: Isotype trains the denoiser on pictures and captions"
    if str(said.get("lora_type") or "").lower() == "lycoris" or said.get("lycoris_config"):
        return f"{place.get('lora_type', place.get('lycoris_config', ''))}: LyCORIS is not offered: adapter.kind is lora; lora_type=standard can be translated"
    if base not in ("no_change", "") and "nf4" not in base:
        return f"{place['base_model_precision']}: {base}: an int8 or fp8 base is not offered: no_change (bf16), or nf4-bnb"
    if family in VIDEO or any(
        str(v) in ("video", "audio") for k, v in said.items() if k.startswith(f"{DATASET}.") and k.endswith(".dataset_type")
    ):
        where = (
            place["model_family"]
            if family in VIDEO
            else next(place[k] for k, v in said.items() if k.startswith(f"{DATASET}.") and str(v) in ("video", "audio"))
        )
        return f"{where}: video is not offered: Isotype trains on pictures"
    if family and family not in FAMILIES:
        return f"{place['model_family']}: {family} is not offered: {', '.join(sorted(FAMILIES))}"
    if truth(said.get("train_text_encoder", False)):
        return f"{place['train_text_encoder']}: text encoders are not trained: they are freed before the denoiser is loaded"
    return None


def stops(code: str) -> bool:
    """Whether a contradiction that `isotype doctor check` found stops the translation."""
    return code not in _STOPPED_BY_NOTHING


def _kind(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.kind", "none" if str(given.value).lower() == "full" else "lora")


def _resolution(draft: Draft, given: Given) -> None:
    draft.set(given, "images.resolution", pixels(given.value, draft.keys.get("resolution_type", "pixel_area")))


def _optimizer(draft: Draft, given: Given) -> None:
    name = str(given.value).lower()
    if name in ("adamw_bf16", "optimi-adamw", "optimi-adam", "adamw"):
        note = "bf16 weights with stochastic rounding: precision.preset decides" if name == "adamw_bf16" else ""
        draft.set(given, "train.optimizer", "adamw", note)
    elif name in ("ao-adamw8bit", "bnb-adamw8bit", "bnb-adamw8bit-paged"):
        draft.set(given, "train.optimizer", "adamw8bit")
    else:
        draft.not_offered(given, "train.optimizer is adamw or adamw8bit; adamw is used, its learning rate may have to differ")


def _schedule(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word in _SCHEDULES:
        draft.set(given, "train.schedule", _SCHEDULES[word])
        if word == "constant":
            draft.settings["train.warmup"] = 0
    elif word in ("polynomial", "sine"):
        near = "linear" if word == "polynomial" else "cosine"
        draft.set(given, "train.schedule", near, f"{word} is not offered; {near} is the nearest")
    else:
        draft.not_offered(given, "train.schedule is cosine, linear, constant or wsd; cosine is used")


def _warmup(draft: Draft, given: Given) -> None:
    if str(draft.keys.get("lr_scheduler")) == "constant":
        draft.no_effect(given, "a constant schedule has no warm-up, there too")
    else:
        draft.set(given, "train.warmup", number(given.value or 0))


def _lr_end(draft: Draft, given: Given) -> None:
    rate = float(draft.keys.get("learning_rate") or 0)
    if rate and float(given.value) <= rate:
        draft.set(given, "train.min_learning_rate", float(given.value) / rate, "a share of the peak")
    else:
        draft.not_offered(given, "train.min_learning_rate is a share of the peak")


def _gradient_precision(draft: Draft, given: Given) -> None:
    if str(given.value).lower() in ("fp32", "float32"):
        draft.set(
            given,
            "precision.grads",
            "fp32",
            "what it meant: gradients of bf16 weights, accumulated in fp32; SimpleTuner accepts and ignores it",
        )
    else:
        draft.changed(given, "gradients are accumulated in fp32 (precision.grads)")


def _vae_dtype(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word in ("fp32", "bf16"):
        draft.set(given, "precision.vae", word)
    else:
        draft.no_effect(given, "the default: the VAE computes in fp32")


def _text_precision(draft: Draft, given: Given) -> None:
    if str(given.value) == "no_change":
        draft.no_effect(given, "text encoders run once, in precision.text_encoder, and are then freed")
    else:
        draft.not_offered(given, "quantised text encoders; they run once, before the denoiser is loaded, and are then freed")


def _ema(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.set(given, "train.ema", float(draft.keys.get("ema_decay") or 0.995), "kept in fp32, and saved beside the trained result")
    else:
        draft.no_effect(given, "switched off")


def _shift(draft: Draft, given: Given) -> None:
    if number(given.value) > 0:
        draft.set(given, "diffusion.shift", float(given.value))
    else:
        draft.changed(given, "diffusion.shift: auto, the scheduler's own")


def _uniform(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.set(given, "diffusion.timesteps", "uniform")
    else:
        draft.no_effect(given, "switched off")


def _snr(draft: Draft, given: Given) -> None:
    draft.settings["diffusion.weighting"] = "min_snr"
    draft.set(given, "diffusion.snr_gamma", float(given.value), "with diffusion.weighting: min_snr")


def _prompt(draft: Draft, given: Given) -> None:
    prompts = draft.settings.setdefault("run.samples", [])
    draft.set(given, "run.samples", [*prompts, str(given.value)])


def _prompts_file(draft: Draft, given: Given) -> None:
    import json
    from pathlib import Path

    try:
        read = json.loads((Path(draft.folder) / str(given.value)).read_text(encoding="utf-8"))
        prompts = [str(v) for v in (read.values() if isinstance(read, dict) else read)]
    except (OSError, ValueError, TypeError):
        draft.not_offered(given, "the file is not there: run.samples takes the prompts themselves")
        return
    draft.set(given, "run.samples", [*draft.settings.get("run.samples", []), *prompts])


def _sample_size(draft: Draft, given: Given) -> None:
    first = str(given.value).partition(",")[0].lower()
    width, _, height = first.partition("x")
    if height and height != width:
        draft.set(given, "run.sample_size", max(int(width), int(height)), "samples are squares")
    else:
        draft.set(given, "run.sample_size", pixels(width, "pixel") if float(width) > 16 else pixels(width, "area"))


def _checkpointing_every(draft: Draft, given: Given) -> None:
    if number(given.value or 0) > 1:
        draft.settings["train.gradient_checkpointing"] = "layers"
        draft.set(given, "train.checkpointed_layers", f"every {int(given.value)}")
    else:
        draft.no_effect(given, "every block: the default")


def _targets(draft: Draft, given: Given) -> None:
    if str(given.value).startswith("all"):
        draft.set(given, "adapter.targets", "all-linear", "every linear layer of the denoiser's blocks")
    else:
        draft.not_offered(given, "adapter.targets names the modules; all-linear is used")


def _model(draft: Draft, given: Given) -> None:
    draft.set(given, "model.name", str(given.value))


def _flavour(draft: Draft, given: Given) -> None:
    known = HUB.get((str(draft.keys.get("model_family")), str(given.value)))
    if draft.keys.get("pretrained_model_name_or_path"):
        draft.no_effect(given, "pretrained_model_name_or_path names the model")
    elif known:
        draft.set(given, "model.name", known)
    else:
        draft.not_offered(given, "put the model's folder or hub id into model.name")


_off = no_effect("not part of a run's result")
KEYS: dict[str, Handler] = {
    DATASET: dataset_key,
    "data_backend_config": no_effect("its datasets are images.*"),
    "model_type": _kind,
    "model_family": no_effect("the model's folder decides"),
    "model_flavour": _flavour,
    "pretrained_model_name_or_path": _model,
    "revision": to("model.revision"),
    "variant": no_effect("the folder's weights are taken, and cast"),
    "output_dir": to("run.folder"),
    "seed": to_count("train.seed"),
    "resolution": _resolution,
    "resolution_type": no_effect("images.resolution is a side in pixels"),
    "aspect_bucket_rounding": no_effect("buckets have sides of whole blocks, by the resolution"),
    "aspect_bucket_alignment": no_effect("buckets have sides of whole blocks, by the resolution"),
    "caption_dropout_probability": to_number("images.caption_dropout"),
    "caption_strategy": no_effect("the dataset file decides"),
    "instance_prompt": no_effect("the dataset file decides"),
    "ignore_missing_files": lambda draft, given: draft.set(given, "images.on_bad_row", "skip", "up to 5% of the pictures") if truth(given.value) else draft.no_effect(given, "switched off"),
    "max_train_steps": to_count("train.steps"),
    "num_train_epochs": lambda draft, given: to_number("train.epochs")(draft, given) if number(given.value or 0) > 0 else draft.no_effect(given, "max_train_steps decides"),
    "train_batch_size": to_count("train.batch_size"),
    "gradient_accumulation_steps": to_count("train.accumulate"),
    "learning_rate": to_number("train.learning_rate"),
    "lr_scheduler": _schedule,
    "lr_warmup_steps": _warmup,
    "lr_end": _lr_end,
    "lr_num_cycles": not_offered("train.schedule has one cycle"),
    "lr_power": no_effect("of a polynomial schedule"),
    "lr_scale": not_offered("the learning rate is what the file says"),
    "optimizer": _optimizer,
    "optimizer_config": not_offered("train.beta1, train.beta2, train.epsilon, train.weight_decay"),
    "optimizer_beta1": to_number("train.beta1"),
    "optimizer_beta2": to_number("train.beta2"),
    "adam_beta1": to_number("train.beta1"),
    "adam_beta2": to_number("train.beta2"),
    "adam_weight_decay": to_number("train.weight_decay"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "grad_clip_method": no_effect("gradients are clipped by their norm"),
    "gradient_checkpointing": lambda draft, given: draft.set(given, "train.gradient_checkpointing", "layers" if truth(given.value) else "none"),
    "gradient_checkpointing_interval": _checkpointing_every,
    "mixed_precision": precision,
    "base_model_precision": precision,
    "base_model_default_dtype": precision,
    "pure_bf16": precision,
    "gradient_precision": _gradient_precision,
    "vae_dtype": _vae_dtype,
    "allow_tf32": no_effect("PyTorch's own setting is left as it is"),
    **{f"text_encoder_{i}_precision": _text_precision for i in (1, 2, 3, 4)},
    "lora_rank": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": to_number("adapter.dropout"),
    "lora_type": no_effect("standard: PEFT's LoRA"),
    "lora_init_type": lambda draft, given: draft.no_effect(given, "PEFT's default") if str(given.value) in ("default", "true", "True") else draft.not_offered(given, "PEFT's default initialisation is used"),
    "flux_lora_target": _targets,
    "lora_target": _targets,
    "use_dora": not_offered("DoRA is not offered"),
    "peft_lora_mode": lambda draft, given: draft.no_effect(given, "standard") if str(given.value) == "standard" else draft.not_offered(given, "SingLoRA is not offered"),
    "init_lora": not_offered("adapter.start_from goes on with a PEFT folder, such as RUN/adapter"),
    "lycoris_config": no_effect("LoRA is PEFT's"),
    "use_ema": _ema,
    "ema_decay": lambda draft, given: draft.no_effect(given, "part of train.ema" if truth(draft.keys.get("use_ema", False)) else "without use_ema"),
    **dict.fromkeys(("ema_device", "ema_cpu_only", "ema_update_interval", "ema_foreach_disable", "ema_validation"), no_effect("the average is kept in fp32, and updated every step")),
    "flow_schedule_shift": _shift,
    "flow_schedule_auto_shift": lambda draft, given: draft.changed(given, "diffusion.shift: auto, the scheduler's own") if truth(given.value) else draft.no_effect(given, "switched off"),
    "flow_use_uniform_schedule": _uniform,
    "flow_sigmoid_scale": lambda draft, given: draft.no_effect(given, "the default") if float(given.value) == 1 else draft.not_offered(given, "diffusion.timesteps: logit_normal with scale 1"),
    "flow_use_beta_schedule": not_offered("diffusion.timesteps is logit_normal or uniform"),
    "snr_gamma": _snr,
    "use_soft_min_snr": not_offered("diffusion.weighting: min_snr clamps"),
    "flux_guidance_value": to_number("diffusion.guidance"),
    "flux_guidance_mode": lambda draft, given: draft.no_effect(given, "constant") if str(given.value) == "constant" else draft.not_offered(given, "diffusion.guidance is constant"),
    **dict.fromkeys(("flux_guidance_min", "flux_guidance_max"), no_effect("of the guidance mode random-range")),
    **dict.fromkeys(("flux_fast_schedule", "flux_attention_masked_training", "masked_loss_probability"), not_offered("every picture counts by its mask, and captions are padded as the pipeline does")),
    "tokenizer_max_length": to_count("diffusion.max_text_length"),
    "validation_prompt": _prompt,
    "user_prompt_library": _prompts_file,
    "validation_prompt_library": not_offered("run.samples takes prompts"),
    "validation_step_interval": to_count("run.sample_every"),
    "validation_epoch_interval": not_offered("run.sample_every is a number of steps"),
    "validation_num_inference_steps": to_count("run.sample_steps"),
    "validation_guidance": to_number("run.sample_guidance"),
    "validation_guidance_rescale": lambda draft, given: draft.no_effect(given, "switched off") if number(given.value or 0) == 0 else draft.not_offered(given, "run.sample_guidance, which is not rescaled"),
    "validation_resolution": _sample_size,
    "validation_seed": no_effect("samples are drawn from train.seed, the same at every step"),
    "validation_disable": lambda draft, given: draft.set(given, "run.sample_every", 0) if truth(given.value) else draft.no_effect(given, "switched off"),
    "num_validation_images": not_offered("each prompt gives one picture: name it twice in run.samples"),
    "validation_negative_prompt": changed("guidance starts from the empty prompt"),
    "checkpoint_step_interval": to_count("run.save_every"),
    "checkpoint_epoch_interval": not_offered("run.save_every is a number of steps"),
    "checkpoints_total_limit": to_count("run.keep"),
    "eval_steps_interval": to_count("train.eval_every"),
    "report_to": trackers,
    "resume_from_checkpoint": changed("isotype train --resume RUN"),
    "attention_mechanism": no_effect("diffusers' attention is PyTorch's scaled_dot_product_attention"),
    "fuse_qkv_projections": no_effect("LoRA's projections are grouped where they can be: model.optimize"),
    "minimum_image_size": not_offered("pictures of every size are scaled to images.resolution"),
    "maximum_image_size": no_effect("pictures are scaled before they are cut"),
    "target_downsample_size": no_effect("pictures are scaled before they are cut"),
    "loss_type": lambda draft, given: draft.no_effect(given, "squared error") if str(given.value) == "l2" else draft.not_offered(given, "the loss is the squared error"),
    "prediction_type": lambda draft, given: draft.set(given, "diffusion.objective", {"epsilon": "epsilon", "v_prediction": "v"}.get(str(given.value), "auto")),
    "noise_offset": not_offered("noise is Gaussian"),
    "input_perturbation": not_offered("noise is Gaussian"),
    "num_processes": no_effect("not set in the file: it says what a step is, not on how many GPUs"),
    "deepspeed_config": not_offered("DeepSpeed is not offered"),
    "train_text_encoder": no_effect("switched off"),
    **dict.fromkeys(("controlnet", "control"), no_effect("switched off")),
    **dict.fromkeys(("fsdp_*", "accelerate_*", "num_machines"), no_effect("not set in the file: it says what a step is, not on how many GPUs")),
    **dict.fromkeys(("vae_*", "text_encoder_batch_size", "text_cache_*", "cache_dir*", "preserve_data_backend_cache", "write_batch_size", "read_batch_size",
                     "metadata_update_interval", "image_processing_batch_size", "aws_*", "compress_disk_cache", "offload_*", "quantize_via", "delete_*",
                     "skip_file_discovery", "max_workers", "torch_num_threads", "dataloader_prefetch*", "text_embeds_*", "enable_multiprocessing"),
                    no_effect("latents and embeddings are kept under a key of all that shaped them: images.cache")),
    **dict.fromkeys(("push_*", "hub_*", "publishing_config", "model_card_*", "tracker_*", "webhook_*", "hf_token", "wandb_*", "huggingface_token", "webhook_config"),
                    no_effect("nothing is uploaded; a secret stays in the environment")),
    **dict.fromkeys(("validation_*", "eval_*", "num_eval_images", "evaluation_type", "pretrained_evaluation_model_name_or_path"),
                    not_offered("samples have run.sample_steps, run.sample_size, run.sample_guidance")),
    **dict.fromkeys(("disable_benchmark", "debug_*", "print_*", "i_know_what_i_am_doing", "disable_*", "override_dataset_config", "logging_dir", "dynamo_*", "env",
                     "simpletuner_*", "user_*", "enable_xformers_memory_efficient_attention", "set_grads_to_none", "framerate", "enable_watermark"), _off),
    **dict.fromkeys(("distillation_*", "tread_config", "twinflow_*", "slider_*", "singlora_*", "musubi_*", "layersync_*", "crepa_*", "sdnq_*", "layer_freeze_strategy"),
                    not_offered("the objective is flow matching, epsilon or v")),
}  # fmt: skip


def finish(draft: Draft, source: Source) -> None:
    """SimpleTuner's defaults where they are not Isotype's, and the datasets."""
    draft.default("adapter.kind", "none")
    if draft.settings["adapter.kind"] == "none":
        for key in [key for key in draft.settings if key.startswith("adapter.") and key != "adapter.kind"]:
            del draft.settings[key]
    else:
        draft.default("adapter.r", 16)
        draft.default("adapter.alpha", float(draft.settings["adapter.r"]))
    draft.default("train.weight_decay", 1e-2)
    draft.default("train.epsilon", 1e-6)
    if "images.resolution" not in draft.settings:
        draft.default("images.resolution", 1024)
    finish_data(draft)
    if "images.eval" not in draft.settings:
        draft.default("images.eval_split", 0.0)  # it trains on every picture
    if "train.steps" in draft.settings:
        draft.settings.pop("train.epochs", None)
