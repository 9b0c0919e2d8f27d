"""SimpleTuner: config.env, JSON and TOML, and the dataset file that they name
(multidatabackend.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..precision.packing import DTYPES_ON_LOAD
from . import pictures as p
from . import transforms as t
from .source import Source
from .transforms import Draft, Given

FLOW = ("flux", "flux2", "sd3", "qwen_image", "z_image", "chroma", "sana", "auraflow")
FAMILIES = (*FLOW, "pixart_sigma", "sdxl", "sd1x", "sd2x")
ATTENTION = [
    "to_k",
    "to_q",
    "to_v",
    "to_out.0",
    "add_k_proj",
    "add_q_proj",
    "add_v_proj",
    "to_add_out",
]
VIDEO = (
    *(
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
    ),
    *("longcat_video", "mochi"),
)
HUB = {  # family and flavour -> the model that SimpleTuner takes where none is named
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev", ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("sd3", "medium"): "stabilityai/stable-diffusion-3.5-medium", ("sd3", "large"): "stabilityai/stable-diffusion-3.5-large",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
}  # fmt: skip
# a contradiction that does not stop a translation: what it asks for is what the result has
HARMLESS = ("CF020",)
_OPTIMIZERS = {
    "adamw_bf16": ("adamw", "bf16 weights with stochastic rounding: precision.preset decides"),
    **t.OPTIMIZERS,
    "optimi-adam": "adamw",
    **dict.fromkeys(
        ("adamw_schedulefree+aggressive", "adamw_schedulefree+no_kahan"), "schedule-free"
    ),
    "prodigy": ("prodigy", "Prodigy without SimpleTuner's averages"),
}
_SCHEDULES = {
    **{
        word: t.SCHEDULES[word] for word in ("constant", "constant_with_warmup", "linear", "cosine")
    },
    "polynomial": ("linear", "polynomial is not offered; linear is the nearest"),
    "sine": ("cosine", "sine is not offered; cosine is the nearest"),
}


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    said = {given.name: given.value for given in source.keys}
    place = {given.name: f"line {given.line}: {given.written}" for given in source.keys}
    family = str(said.get("model_family") or "").lower()
    kind = str(said.get("model_type") or "").lower()
    base = str(said.get("base_model_precision") or "no_change").lower()
    on = [
        name
        for name in ("controlnet", "control", "controlnet_model_name_or_path")
        if t.is_on(said.get(name) or False)
    ]
    if on or "controlnet" in kind:
        where = place.get("controlnet", place.get("control", place.get("model_type", "")))
        return (
            f"{where}: ControlNet is not offered: Isotype trains the denoiser on pictures and"
            " captions"
        )
    if str(said.get("lora_type") or "").lower() == "lycoris" or said.get("lycoris_config"):
        where = place.get("lora_type", place.get("lycoris_config", ""))
        return (
            f"{where}: LyCORIS is not offered: adapter.kind is lora; lora_type=standard can be"
            " translated"
        )
    if base not in ("no_change", "") and not any(word in base for word in ("nf4", *DTYPES_ON_LOAD)):
        return (
            f"{place['base_model_precision']}: {base} is not offered: no_change (bf16), fp8-quanto,"
            " int8-quanto, or nf4-bnb"
        )
    moving = [
        name
        for name, value in said.items()
        if name.startswith(f"{p.DATASET}.") and str(value) in ("video", "audio")
    ]
    if family in VIDEO or any(name.endswith(".dataset_type") for name in moving):
        return (
            f"{place['model_family' if family in VIDEO else moving[0]]}: video is not offered:"
            " Isotype trains on pictures"
        )
    if family and family not in FAMILIES:
        return f"{place['model_family']}: {family} is not offered: {', '.join(FAMILIES)}"
    if t.is_on(said.get("train_text_encoder", False)):
        return (
            f"{place['train_text_encoder']}: is not carried over: adapter.text_encoders trains"
            " those of SDXL and Stable Diffusion"
        )
    return None


def _lr_end(draft: Draft, given: Given) -> None:
    rate = float(draft.keys.get("learning_rate") or 0)
    if rate and float(given.value) <= rate:
        draft.set(
            given, "train.min_learning_rate", float(given.value) / rate, "a share of the peak"
        )
    else:
        draft.not_offered(given, "train.min_learning_rate is a share of the peak")


def _base(draft: Draft, given: Given) -> None:
    word = next((word for word in DTYPES_ON_LOAD if word in str(given.value).lower()), None)
    if word is None or str(draft.keys.get("model_type")).lower() != "lora":
        draft.precision(given)
    else:
        draft.set(given, "precision.base", word, "with a scale a channel")


def _ema(draft: Draft, given: Given) -> None:
    decay = float(draft.keys.get("ema_decay") or 0.995)
    t.when_on("train.ema", decay, note="kept in fp32, and saved beside the trained result")(
        draft, given
    )


def _add_prompts(draft: Draft, given: Given, prompts: list[str]) -> None:
    draft.set(given, "run.samples", [*draft.settings.get("run.samples", []), *prompts])


def _prompts_file(draft: Draft, given: Given) -> None:
    try:
        read = json.loads((Path(draft.folder) / str(given.value)).read_text(encoding="utf-8"))
        prompts = [str(value) for value in (read.values() if isinstance(read, dict) else read)]
    except (OSError, ValueError, TypeError):
        draft.not_offered(given, "the file is not there: run.samples takes the prompts themselves")
    else:
        _add_prompts(draft, given, prompts)


def _pixels(value: Any, kind: object) -> int:
    """The side of a square in pixels; megapixels where `kind` is area."""
    size = float(value)
    return int(size) if str(kind) != "area" else max(64, round((size * 1e6) ** 0.5 / 64) * 64)


def _sample_size(draft: Draft, given: Given) -> None:
    width, _, height = str(given.value).partition(",")[0].lower().partition("x")
    if height and height != width:
        draft.set(given, "run.sample_size", max(int(width), int(height)), "samples are squares")
    else:
        draft.set(
            given, "run.sample_size", _pixels(width, "pixel" if float(width) > 16 else "area")
        )


def _checkpointing_every(draft: Draft, given: Given) -> None:
    if t.as_number(given.value or 0) > 1:
        draft.settings["train.gradient_checkpointing"] = "layers"
        draft.set(given, "train.checkpointed_layers", f"every {int(given.value)}")
    else:
        draft.no_effect(given, "every block: the default")


def _targets(draft: Draft, given: Given) -> None:
    if str(given.value) == "all":
        draft.set(
            given,
            "adapter.targets",
            ATTENTION,
            "attention of picture and text, as `all` means there",
        )
    elif str(given.value).startswith("all"):
        draft.set(
            given, "adapter.targets", "all-linear", "every linear layer of the denoiser's blocks"
        )
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


_KEPT = "latents and embeddings are kept under a key of all that shaped them: images.cache"
_TABLE_COLUMNS = "the source is the table itself; images.columns names its columns"


def _entry(draft: Draft, given: Given) -> dict[str, Any]:
    """The dataset to which a key belongs."""
    return p.datasets_of(draft)[int(given.name.split(".")[1])]


def _side(entry: dict[str, Any]) -> str:
    if str(entry.get("dataset_type")) == "eval":
        return "images.eval"
    if t.is_on(entry.get("is_regularisation_data")):
        return "images.regularisation"
    return "images.train"


def _by_instance_prompt(entry: dict[str, Any]) -> bool:
    return str(entry.get("caption_strategy")) == "instanceprompt" or t.is_on(
        entry.get("only_instance_prompt")
    )


def _dataset(draft: Draft, given: Given) -> None:
    """One key of one dataset: `dataset.0.repeats`."""
    key = given.name.split(".", 2)[2]
    entry = _entry(draft, given)
    kind = str(entry.get("dataset_type", "image"))
    store = str(entry.get("type", "local"))
    if t.is_on(entry.get("disabled", entry.get("disable"))):
        draft.no_effect(given, "the dataset is switched off")
    elif kind in ("text_embeds", "image_embeds", "conditioning_image_embeds") or key.startswith(
        "cache_dir"
    ):
        draft.no_effect(given, _KEPT)
    elif kind == "conditioning" and str(entry.get("conditioning_type")) != "mask":
        draft.not_offered(
            given,
            f"conditioning of type {entry.get('conditioning_type', 'controlnet')}: only masks",
        )
    elif kind == "conditioning":
        mask = key == "instance_data_dir"
        (
            t.to("images.masks", str)
            if mask
            else t.no_effect("a mask belongs to the picture of its name")
        )(draft, given)
    elif kind not in ("image", "eval"):
        draft.not_offered(given, f"{kind} datasets")
    elif store not in ("local", "csv"):
        draft.not_offered(
            given,
            f"a dataset of type {store}: put its pictures into a folder, and the folder into"
            " images.train",
        )
    else:
        p.dataset(_OF_PICTURES)(draft, given)


def _folder(draft: Draft, given: Given) -> None:
    draft.set(given, _side(_entry(draft, given)), str(given.value))


def _caption_strategy(draft: Draft, given: Given) -> None:
    word = str(given.value)
    if word == "textfile":
        draft.no_effect(
            given, "a .txt beside each picture, a caption a line: what is read by default"
        )
    elif word in ("instanceprompt", "parquet", "csv"):
        draft.changed(
            given,
            (
                f"{_side(_entry(draft, given))}: caption"
                if word == "instanceprompt"
                else _TABLE_COLUMNS
            ),
        )
    else:
        draft.not_offered(
            given, "captions stand in a .txt beside each picture, or in a table's column"
        )


def _resolution(draft: Draft, given: Given) -> None:
    of_dataset = given.name.startswith(f"{p.DATASET}.")
    own = _entry(draft, given) if of_dataset else {}
    size = _pixels(
        given.value, own.get("resolution_type", draft.keys.get("resolution_type", "pixel_area"))
    )
    before = draft.settings.get("images.resolution")
    if (
        of_dataset
        and before not in (None, size)
        and draft.sources["images.resolution"].name.startswith(f"{p.DATASET}.")
    ):
        draft.not_offered(given, f"a run has one resolution, that of the first dataset: {before}")
    else:
        draft.set(given, "images.resolution", size)


def _squares(draft: Draft, given: Given) -> bool:
    entry = _entry(draft, given)
    return t.is_on(entry.get("crop")) and str(entry.get("crop_aspect", "square")) == "square"


def _crop_style(draft: Draft, given: Given) -> None:
    if not t.is_on(_entry(draft, given).get("crop", True)):
        draft.no_effect(given, "without crop")
    elif str(given.value) == "random":
        t.always("images.crop", 4, p.MANY_WINDOWS)(draft, given)
    else:
        draft.set(
            given,
            "images.crop",
            "center",
            "" if given.value == "center" else f"{given.value} is not offered",
        )


_OF_PICTURES_NO_EFFECT = {
    "images.resolution is a side in pixels": "resolution_type",
    p.BUCKETS: "crop_aspect_buckets",
    "windows at random are kept, and drawn anew each time: images.crop": (
        "vae_cache_clear_each_epoch"
    ),
    _KEPT: (
        "cache_file_suffix text_embeds image_embeds skip_file_discovery preserve_data_backend_cache"
        " default write_batch_size read_batch_size hash_filenames hash_filename"
    ),
    t.IRRELEVANT: "maximum_image_size target_downsample_size id type dataset_type metadata_backend",
}
_OF_PICTURES_NOT_OFFERED = {
    "captions are taken as they are, a line each": (
        "prepend_instance_prompt caption_shuffle caption_filter_list disable_multiline_split"
    ),
    "no picture is left out for its size: take it out of the folder": (
        "minimum_image_size minimum_aspect_ratio maximum_aspect_ratio"
    ),
}
_OF_PICTURES: dict[str, t.Handler] = {
    **t.table(t.no_effect, _OF_PICTURES_NO_EFFECT),
    **t.table(t.not_offered, _OF_PICTURES_NOT_OFFERED),
    **t.each(_folder, "instance_data_dir data_dir"),
    "repeats": t.changed("so many times more than once: repeats of the source"),
    "is_regularisation_data": t.changed("images.regularisation, where it is on"),
    "caption_strategy": _caption_strategy,
    "instance_prompt": t.when(
        lambda draft, given: _by_instance_prompt(_entry(draft, given)),
        lambda draft, given: draft.changed(
            given, f"{_side(_entry(draft, given))}: caption: {given.value}"
        ),
        t.no_effect("without caption_strategy instanceprompt"),
    ),
    "only_instance_prompt": t.changed("caption of the source, where it is on"),
    "parquet": t.changed(_TABLE_COLUMNS),
    "resolution": _resolution,
    **t.each(
        t.when(
            _squares,
            t.no_effect("squares are the default: images.max_aspect"),
            t.always(
                "images.max_aspect",
                2.0,
                "aspect buckets; what a picture is longer than 2 : 1 is cut off",
            ),
        ),
        "crop crop_aspect",
    ),
    "crop_style": _crop_style,
    "conditioning_data": t.changed("images.masks, where it holds masks"),
    "probability": t.only(
        "1 1.0", "switched off", "repeats of a source make its pictures come more often"
    ),
}


_NO_EFFECT = {
    "its datasets are images.*": "data_backend_config",
    "images.resolution is a side in pixels": "resolution_type",
    "LoRA's projections are grouped where they can be: model.optimize": "fuse_qkv_projections",
    "samples are drawn from train.seed, the same at every step": "validation_seed",
    t.GPUS: "num_processes",
    _KEPT: (
        "vae_* text_encoder_batch_size text_cache_* cache_dir* preserve_data_backend_cache"
        " write_batch_size read_batch_size metadata_update_interval image_processing_batch_size"
        " aws_* compress_disk_cache offload_* quantize_via delete_* skip_file_discovery max_workers"
        " torch_num_threads dataloader_prefetch* text_embeds_* enable_multiprocessing"
    ),
    "nothing is uploaded; a secret stays in the environment": (
        "push_* hub_* tracker_* webhook_* hf_token wandb_* huggingface_token"
    ),
    t.IRRELEVANT: (
        "model_family aspect_bucket_rounding aspect_bucket_alignment target_downsample_size"
        " instance_prompt lora_type grad_clip_method ema_device ema_cpu_only ema_update_interval"
        " ema_validation flux_guidance_max attention_mechanism train_text_encoder controlnet"
        " control disable_benchmark debug_* print_* i_know_what_i_am_doing disable_*"
        " override_dataset_config logging_dir dynamo_* env simpletuner_* user_*"
        " enable_xformers_memory_efficient_attention set_grads_to_none framerate enable_watermark"
    ),
}
_NOT_OFFERED = {
    "pictures of every size are scaled to images.resolution": "minimum_image_size",
    "adapter.dora is for language models": "use_dora",
    "adapter.start_from goes on with a PEFT folder, such as RUN/adapter": "init_lora",
    p.ADAM: "optimizer_config",
    "run.samples takes prompts": "validation_prompt_library",
    "each prompt gives one picture: name it twice in run.samples": "num_validation_images",
    "samples have run.sample_steps, run.sample_size, run.sample_guidance": (
        "validation_* num_eval_images evaluation_type"
    ),
    t.NO_SETTING: (
        "input_perturbation masked_loss_probability distillation_* tread_config musubi_* sdnq_*"
        " deepspeed_config"
    ),
}
KEYS: dict[str, t.Handler] = {
    **p.SCRIPT,
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
        images="caption_dropout=caption_dropout_probability",
        diffusion="guidance=flux_guidance_value max_text_length=tokenizer_max_length",
        adapter="r=lora_rank alpha=lora_alpha dropout=lora_dropout",
        train="beta1=optimizer_beta1 beta2=optimizer_beta2 eval_every=eval_steps_interval",
        run=(
            "save_every=checkpoint_step_interval sample_every=validation_step_interval "
            "sample_steps=validation_num_inference_steps sample_guidance=validation_guidance"
        ),
    ),
    "model_flavour": _flavour,
    # pictures
    p.DATASET: _dataset,
    "resolution": _resolution,
    "ignore_missing_files": t.when_on("images.on_bad_row", "skip", note="up to 5% of the pictures"),
    # adapter
    "model_type": t.to(
        "adapter.kind", lambda value: "none" if str(value).lower() == "full" else "lora"
    ),
    **t.each(_targets, "flux_lora_target lora_target"),
    # precision
    **t.each(t.Draft.precision, "mixed_precision base_model_default_dtype pure_bf16"),
    "base_model_precision": _base,
    "gradient_precision": t.when(
        lambda _, given: str(given.value).lower() in ("fp32", "float32"),
        t.always(
            "precision.grads",
            "fp32",
            "what it meant: gradients of bf16 weights, accumulated in fp32; SimpleTuner accepts and"
            " ignores it",
        ),
        t.changed("gradients are accumulated in fp32 (precision.grads)"),
    ),
    "vae_dtype": t.word(
        "precision.vae",
        {"fp32": "fp32", "bf16": "bf16"},
        "the default: the VAE computes in fp32",
        fate="no_effect",
    ),
    **t.each(
        t.only(
            "no_change",
            "text encoders run once, in precision.text_encoder, and are then freed",
            "quantised text encoders; they run once, before the denoiser is loaded, and are then"
            " freed",
        ),
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision"
        " text_encoder_4_precision",
    ),
    # steps
    "num_train_epochs": t.count("train.epochs"),
    "lr_scheduler": t.schedule_of(_SCHEDULES),
    "lr_warmup_steps": t.when(
        lambda draft, _: draft.said("lr_scheduler") == "constant",
        t.no_effect("a constant schedule has no warm-up, there too"),
        t.number("train.warmup"),
    ),
    "lr_end": _lr_end,
    "optimizer": t.word("train.optimizer", _OPTIMIZERS, t.OTHER_OPTIMIZERS),
    "gradient_checkpointing_interval": _checkpointing_every,
    "use_ema": _ema,
    "ema_decay": t.where("use_ema", "on", t.no_effect("part of train.ema"), "without use_ema"),
    # the objective
    "flow_schedule_shift": t.when(
        lambda _, given: t.as_number(given.value) > 0,
        t.to("diffusion.shift", float),
        t.changed("diffusion.shift: auto, the scheduler's own"),
    ),
    "flow_schedule_auto_shift": t.changed(
        "diffusion.shift: auto, the scheduler's own, where it is on"
    ),
    "flow_use_uniform_schedule": t.when_on("diffusion.timesteps", "uniform"),
    "prediction_type": t.to(
        "diffusion.objective",
        lambda value: {"epsilon": "epsilon", "v_prediction": "v"}.get(str(value), "auto"),
    ),
    "loss_type": t.only("l2", "squared error", "the loss is the squared error"),
    # samples
    "validation_prompt": lambda draft, given: _add_prompts(draft, given, [str(given.value)]),
    "user_prompt_library": _prompts_file,
    "validation_guidance_rescale": t.only(
        "0 0.0 None False", "switched off", "run.sample_guidance, which is not rescaled"
    ),
    "validation_resolution": _sample_size,
    "validation_disable": t.when_on("run.sample_every", 0),
    "validation_negative_prompt": t.changed("guidance starts from the empty prompt"),
    # saving, machine
    "resume_from_checkpoint": t.changed("isotype train --resume RUN"),
}


def finish(draft: Draft, source: Source) -> None:
    """SimpleTuner's defaults where they are not Isotype's, and the datasets."""
    flux = str(source.get("model_family")) == "flux"
    if draft.default_adapter("none", 16):
        draft.default_all(
            {"adapter.dropout": 0.1, "adapter.targets": ATTENTION if flux else ATTENTION[:4]}
        )
    draft.default_all(
        {
            "train.weight_decay": 1e-2,
            "train.epsilon": 1e-6,
            "images.resolution": 1024,
            "train.clip": 2.0,
        }
    )
    if str(source.get("model_family") or "flux") in FLOW:
        draft.default("diffusion.shift", 3.0)
    if (
        "max_grad_norm" not in draft.keys
        and str(source.get("grad_clip_method") or "value") == "value"
    ):
        draft.notes.append(
            "train.clip: SimpleTuner clips each value at 2.0; here the norm of all is clipped"
        )
    sides: dict[str, list[dict[str, Any]]] = {}
    for entry in p.datasets_of(draft):
        folder = entry.get("instance_data_dir", entry.get("data_dir"))
        side = _side(entry)
        table = entry.get("parquet")
        used = not t.is_on(entry.get("disabled")) and str(entry.get("type", "local")) in (
            "local",
            "csv",
        )
        if (
            folder is not None
            and used
            and str(entry.get("dataset_type", "image")) in ("image", "eval")
        ):
            name = (
                table.get("path") if isinstance(table, dict) else entry.get("csv_file")
            ) or folder
            caption = entry.get("instance_prompt") if _by_instance_prompt(entry) else None
            repeats = 1 if side == "images.eval" else 1 + float(entry.get("repeats") or 0)
            sides.setdefault(side, []).append(p.source(name, caption=caption, repeats=repeats))
    p.put_sources(draft, sides)
    if "images.train" not in draft.settings and not p.datasets_of(draft):
        named = draft.keys.get("data_backend_config") or "data_backend_config"
        draft.notes.append(
            f"the dataset file was not found ({named}): name your pictures in images.train"
        )
    if "images.eval" not in draft.settings:
        draft.default("images.eval_split", 0.0)  # it trains on every picture
    if "train.steps" in draft.settings:
        draft.settings.pop("train.epochs", None)
