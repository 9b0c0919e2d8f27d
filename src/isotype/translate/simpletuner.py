"""SimpleTuner: config.env, JSON and TOML. Its dataset file is translated by `simpletuner_datasets`."""

from __future__ import annotations

import json
from pathlib import Path

from .draft import Draft, Given
from .picture_tools import min_snr, rate
from .simpletuner_datasets import KEPT, dataset_key, finish_datasets, pixels
from .simpletuner_files import DATASET
from .source import Source
from .transforms import (
    GPUS,
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    SCHEDULES,
    Handler,
    changed,
    each,
    no_effect,
    not_offered,
    number,
    only,
    schedule_of,
    to,
    to_count,
    to_either,
    to_number,
    to_word,
    trackers,
    truth,
    when_on,
)

FLOW = ("flux", "flux2", "sd3", "qwen_image", "z_image", "chroma", "sana", "auraflow")
FAMILIES = (*FLOW, "pixart_sigma", "sdxl", "sd1x", "sd2x")
ATTENTION = ["to_k", "to_q", "to_v", "to_out.0", "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"]
VIDEO = (
    *("wan", "wan_s2v", "ltxvideo", "ltxvideo2", "hunyuanvideo", "sanavideo", "cosmos", "cosmos2image", "cosmos3", "kandinsky5-video"),
    *("longcat_video", "mochi"),
)
HUB = {  # family and flavour -> the model that SimpleTuner takes where none is named
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev", ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("sd3", "medium"): "stabilityai/stable-diffusion-3.5-medium", ("sd3", "large"): "stabilityai/stable-diffusion-3.5-large",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
}  # fmt: skip
# contradictions that do not stop a translation: what CF020 asks for is what the result has; CF029 is how SimpleTuner's own reader differs
HARMLESS = ("CF020", "CF029")
_OPTIMIZERS = {
    "adamw_bf16": ("adamw", "bf16 weights with stochastic rounding: precision.preset decides"),
    **OPTIMIZERS,
    "optimi-adam": "adamw",
    **dict.fromkeys(("adamw_schedulefree+aggressive", "adamw_schedulefree+no_kahan"), "schedule-free"),
    "prodigy": ("prodigy", "Prodigy without SimpleTuner's averages"),
}
_SCHEDULES = {
    **{word: SCHEDULES[word] for word in ("constant", "constant_with_warmup", "linear", "cosine")},
    "polynomial": ("linear", "polynomial is not offered; linear is the nearest"),
    "sine": ("cosine", "sine is not offered; cosine is the nearest"),
}


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    said = {given.name: given.value for given in source.keys}
    place = {given.name: f"line {given.line}: {given.written}" for given in source.keys}
    family, kind = str(said.get("model_family") or "").lower(), str(said.get("model_type") or "").lower()
    base = str(said.get("base_model_precision") or "no_change").lower()
    on = [name for name in ("controlnet", "control", "controlnet_model_name_or_path") if truth(said.get(name) or False)]
    if on or "controlnet" in kind:
        where = place.get("controlnet", place.get("control", place.get("model_type", "")))
        return f"{where}: ControlNet is not offered: Isotype trains the denoiser on pictures and captions"
    if str(said.get("lora_type") or "").lower() == "lycoris" or said.get("lycoris_config"):
        where = place.get("lora_type", place.get("lycoris_config", ""))
        return f"{where}: LyCORIS is not offered: adapter.kind is lora; lora_type=standard can be translated"
    if base not in ("no_change", "") and "nf4" not in base:
        return f"{place['base_model_precision']}: {base}: an int8 or fp8 base is not offered: no_change (bf16), or nf4-bnb"
    moving = [name for name, value in said.items() if name.startswith(f"{DATASET}.") and str(value) in ("video", "audio")]
    if family in VIDEO or any(name.endswith(".dataset_type") for name in moving):
        return f"{place['model_family' if family in VIDEO else moving[0]]}: video is not offered: Isotype trains on pictures"
    if family and family not in FAMILIES:
        return f"{place['model_family']}: {family} is not offered: {', '.join(FAMILIES)}"
    if truth(said.get("train_text_encoder", False)):
        return f"{place['train_text_encoder']}: text encoders are not trained: they are freed before the denoiser is loaded"
    return None


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
        meant = "what it meant: gradients of bf16 weights, accumulated in fp32; SimpleTuner accepts and ignores it"
        draft.set(given, "precision.grads", "fp32", meant)
    else:
        draft.changed(given, "gradients are accumulated in fp32 (precision.grads)")


def _vae_dtype(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word in ("fp32", "bf16"):
        draft.set(given, "precision.vae", word)
    else:
        draft.no_effect(given, "the default: the VAE computes in fp32")


def _ema(draft: Draft, given: Given) -> None:
    decay = float(draft.keys.get("ema_decay") or 0.995)
    when_on("train.ema", decay, note="kept in fp32, and saved beside the trained result")(draft, given)


def _shift(draft: Draft, given: Given) -> None:
    if number(given.value) > 0:
        draft.set(given, "diffusion.shift", float(given.value))
    else:
        draft.changed(given, "diffusion.shift: auto, the scheduler's own")


def _auto_shift(draft: Draft, given: Given) -> None:
    if truth(given.value):
        draft.changed(given, "diffusion.shift: auto, the scheduler's own")
    else:
        draft.no_effect(given, "switched off")


def _prompt(draft: Draft, given: Given) -> None:
    draft.set(given, "run.samples", [*draft.settings.get("run.samples", []), str(given.value)])


def _prompts_file(draft: Draft, given: Given) -> None:
    try:
        read = json.loads((Path(draft.folder) / str(given.value)).read_text(encoding="utf-8"))
        prompts = [str(value) for value in (read.values() if isinstance(read, dict) else read)]
    except (OSError, ValueError, TypeError):
        draft.not_offered(given, "the file is not there: run.samples takes the prompts themselves")
    else:
        draft.set(given, "run.samples", [*draft.settings.get("run.samples", []), *prompts])


def _sample_size(draft: Draft, given: Given) -> None:
    width, _, height = str(given.value).partition(",")[0].lower().partition("x")
    if height and height != width:
        draft.set(given, "run.sample_size", max(int(width), int(height)), "samples are squares")
    else:
        draft.set(given, "run.sample_size", pixels(width, "pixel" if float(width) > 16 else "area"))


def _checkpointing_every(draft: Draft, given: Given) -> None:
    if number(given.value or 0) > 1:
        draft.settings["train.gradient_checkpointing"] = "layers"
        draft.set(given, "train.checkpointed_layers", f"every {int(given.value)}")
    else:
        draft.no_effect(given, "every block: the default")


def _targets(draft: Draft, given: Given) -> None:
    if str(given.value) == "all":
        draft.set(given, "adapter.targets", ATTENTION, "attention of picture and text, as `all` means there")
    elif str(given.value).startswith("all"):
        draft.set(given, "adapter.targets", "all-linear", "every linear layer of the denoiser's blocks")
    else:
        draft.not_offered(given, "adapter.targets names the modules; all-linear is used")


def _flavour(draft: Draft, given: Given) -> None:
    known = HUB.get((str(draft.keys.get("model_family")), str(given.value)))
    if draft.keys.get("pretrained_model_name_or_path"):
        draft.no_effect(given, "pretrained_model_name_or_path names the model")
    elif known:
        draft.set(given, "model.name", known)
    else:
        draft.not_offered(given, "put the model's folder or hub id into model.name")


def _epochs(draft: Draft, given: Given) -> None:
    if number(given.value or 0) > 0:
        to_number("train.epochs")(draft, given)
    else:
        draft.no_effect(given, "max_train_steps decides")


def _resolution(draft: Draft, given: Given) -> None:
    draft.set(given, "images.resolution", pixels(given.value, draft.keys.get("resolution_type", "pixel_area")))


def _ema_decay(draft: Draft, given: Given) -> None:
    draft.no_effect(given, "part of train.ema" if truth(draft.keys.get("use_ema", False)) else "without use_ema")


KEYS: dict[str, Handler] = {
    "model_family": no_effect("the model's folder decides"),
    "model_flavour": _flavour,
    "pretrained_model_name_or_path": to("model.name", str),
    "revision": to("model.revision"),
    # pictures
    DATASET: dataset_key,
    "data_backend_config": no_effect("its datasets are images.*"),
    "resolution": _resolution,
    "resolution_type": no_effect("images.resolution is a side in pixels"),
    **each(no_effect("buckets have sides of whole blocks, by the resolution"), "aspect_bucket_rounding aspect_bucket_alignment"),
    "minimum_image_size": not_offered("pictures of every size are scaled to images.resolution"),
    **each(no_effect("pictures are scaled before they are cut"), "target_downsample_size"),
    "caption_dropout_probability": to_number("images.caption_dropout"),
    **each(no_effect("the dataset file decides"), "instance_prompt"),
    "ignore_missing_files": when_on("images.on_bad_row", "skip", note="up to 5% of the pictures"),
    # adapter
    "model_type": to("adapter.kind", lambda value: "none" if str(value).lower() == "full" else "lora"),
    "lora_rank": to_count("adapter.r"),
    "lora_alpha": to_number("adapter.alpha"),
    "lora_dropout": to_number("adapter.dropout"),
    "lora_type": no_effect("standard: PEFT's LoRA"),
    **each(_targets, "flux_lora_target lora_target"),
    "use_dora": not_offered("adapter.dora is for language models"),
    "init_lora": not_offered("adapter.start_from goes on with a PEFT folder, such as RUN/adapter"),
    # precision
    **each(Draft.precision, "mixed_precision base_model_precision base_model_default_dtype pure_bf16"),
    "gradient_precision": _gradient_precision,
    "vae_dtype": _vae_dtype,
    **each(
        only(
            "no_change",
            "text encoders run once, in precision.text_encoder, and are then freed",
            "quantised text encoders; they run once, before the denoiser is loaded, and are then freed",
        ),
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision",
    ),
    # steps
    "seed": to_count("train.seed"),
    "max_train_steps": to_count("train.steps"),
    "train_batch_size": to_count("train.batch_size"),
    "gradient_accumulation_steps": to_count("train.accumulate"),
    "num_train_epochs": _epochs,
    "learning_rate": rate("optimizer"),
    "adam_weight_decay": to_number("train.weight_decay"),
    "adam_epsilon": to_number("train.epsilon"),
    "max_grad_norm": to_number("train.clip"),
    "lr_scheduler": schedule_of(_SCHEDULES),
    "lr_warmup_steps": _warmup,
    "lr_end": _lr_end,
    "optimizer": to_word("train.optimizer", _OPTIMIZERS, OTHER_OPTIMIZERS),
    "optimizer_config": not_offered("train.beta1, train.beta2, train.epsilon, train.weight_decay"),
    **each(to_number("train.beta1"), "optimizer_beta1 adam_beta1"),
    **each(to_number("train.beta2"), "optimizer_beta2 adam_beta2"),
    "grad_clip_method": no_effect("gradients are clipped by their norm"),
    "gradient_checkpointing": to_either("train.gradient_checkpointing", "layers", "none"),
    "gradient_checkpointing_interval": _checkpointing_every,
    "use_ema": _ema,
    "ema_decay": _ema_decay,
    **each(
        no_effect("the average is kept in fp32, and updated every step"),
        "ema_device ema_cpu_only ema_update_interval ema_validation",
    ),
    # the objective
    "flow_schedule_shift": _shift,
    "flow_schedule_auto_shift": _auto_shift,
    "flow_use_uniform_schedule": when_on("diffusion.timesteps", "uniform"),
    "prediction_type": to("diffusion.objective", lambda value: {"epsilon": "epsilon", "v_prediction": "v"}.get(str(value), "auto")),
    "loss_type": only("l2", "squared error", "the loss is the squared error"),
    "snr_gamma": min_snr,
    **each(not_offered("noise is Gaussian"), "input_perturbation"),
    "flux_guidance_value": to_number("diffusion.guidance"),
    **each(no_effect("of the guidance mode random-range"), "flux_guidance_max"),
    **each(
        not_offered("every picture counts by its mask, and captions are padded as the pipeline does"),
        "masked_loss_probability",
    ),
    "tokenizer_max_length": to_count("diffusion.max_text_length"),
    "attention_mechanism": no_effect("diffusers' attention is PyTorch's scaled_dot_product_attention"),
    "fuse_qkv_projections": no_effect("LoRA's projections are grouped where they can be: model.optimize"),
    **each(
        not_offered("the objective is flow matching, epsilon or v"),
        "distillation_* tread_config musubi_* sdnq_*",
    ),
    # samples
    "validation_prompt": _prompt,
    "user_prompt_library": _prompts_file,
    "validation_prompt_library": not_offered("run.samples takes prompts"),
    "validation_step_interval": to_count("run.sample_every"),
    "validation_num_inference_steps": to_count("run.sample_steps"),
    "validation_guidance": to_number("run.sample_guidance"),
    "validation_guidance_rescale": only("0 0.0 None False", "switched off", "run.sample_guidance, which is not rescaled"),
    "validation_resolution": _sample_size,
    "validation_seed": no_effect("samples are drawn from train.seed, the same at every step"),
    "validation_disable": when_on("run.sample_every", 0),
    "num_validation_images": not_offered("each prompt gives one picture: name it twice in run.samples"),
    "validation_negative_prompt": changed("guidance starts from the empty prompt"),
    **each(
        not_offered("samples have run.sample_steps, run.sample_size, run.sample_guidance"),
        "validation_* num_eval_images evaluation_type",
    ),
    # saving, machine
    "output_dir": to("run.folder"),
    "checkpoint_step_interval": to_count("run.save_every"),
    "checkpoints_total_limit": to_count("run.keep"),
    "eval_steps_interval": to_count("train.eval_every"),
    "report_to": trackers,
    "resume_from_checkpoint": changed("isotype train --resume RUN"),
    "deepspeed_config": not_offered("DeepSpeed is not offered"),
    **each(no_effect("switched off"), "train_text_encoder controlnet control"),
    **each(no_effect(GPUS), "num_processes"),
    **each(
        no_effect(KEPT),
        "vae_* text_encoder_batch_size text_cache_* cache_dir* preserve_data_backend_cache write_batch_size read_batch_size "
        "metadata_update_interval image_processing_batch_size aws_* compress_disk_cache offload_* quantize_via delete_* "
        "skip_file_discovery max_workers torch_num_threads dataloader_prefetch* text_embeds_* enable_multiprocessing",
    ),
    **each(
        no_effect("nothing is uploaded; a secret stays in the environment"),
        "push_* hub_* tracker_* webhook_* hf_token wandb_* huggingface_token",
    ),
    **each(
        no_effect("not part of a run's result"),
        "disable_benchmark debug_* print_* i_know_what_i_am_doing disable_* override_dataset_config logging_dir dynamo_* env "
        "simpletuner_* user_* enable_xformers_memory_efficient_attention set_grads_to_none framerate enable_watermark",
    ),
}


def finish(draft: Draft, source: Source) -> None:
    """SimpleTuner's defaults where they are not Isotype's, and the datasets."""
    draft.default("adapter.kind", "none")
    if not draft.without_adapter():
        draft.default("adapter.r", 16)
        draft.default("adapter.alpha", float(draft.settings["adapter.r"]))
    draft.default("train.weight_decay", 1e-2)
    draft.default("train.epsilon", 1e-6)
    draft.default("images.resolution", 1024)
    draft.default("train.clip", 2.0)
    if str(source.get("model_family") or "flux") in FLOW and "diffusion.shift" not in draft.settings:
        draft.default("diffusion.shift", 3.0)
    if draft.settings["adapter.kind"] == "lora":
        draft.default("adapter.dropout", 0.1)
        if "adapter.targets" not in draft.settings:
            draft.default("adapter.targets", ATTENTION if str(source.get("model_family")) == "flux" else ATTENTION[:4])
    if "max_grad_norm" not in draft.keys and str(source.get("grad_clip_method") or "value") == "value":
        draft.notes.append("train.clip: SimpleTuner clips each value at 2.0; here the norm of all is clipped")
    finish_datasets(draft)
    if "images.eval" not in draft.settings:
        draft.default("images.eval_split", 0.0)  # it trains on every picture
    if "train.steps" in draft.settings:
        draft.settings.pop("train.epochs", None)
