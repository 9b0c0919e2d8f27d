"""Translates a configuration file of SimpleTuner (config.env, JSON or TOML) to an Isotype
configuration, with the dataset file that it names (multidatabackend.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..precision.packing import DTYPES_ON_LOAD
from . import clips, pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey

CLIP_FAMILIES = ("wan", "ltxvideo", "ltxvideo2")  # the families for videos that Isotype trains
FLOW_FAMILIES = (
    *("flux", "flux2", "sd3", "qwen_image", "z_image", "chroma", "sana", "auraflow"),
    *CLIP_FAMILIES,
)
FAMILIES = (*FLOW_FAMILIES, "pixart_sigma", "sdxl", "sd1x", "sd2x")
ATTENTION_TARGETS = [
    "to_k",
    "to_q",
    "to_v",
    "to_out.0",
    "add_k_proj",
    "add_q_proj",
    "add_v_proj",
    "to_add_out",
]
VIDEO_FAMILIES = (
    *(
        "wan_s2v",
        "hunyuanvideo",
        "sanavideo",
        "cosmos",
        "cosmos2image",
        "cosmos3",
        "kandinsky5-video",
    ),
    *("longcat_video", "mochi"),
)
DEFAULT_MODELS = {  # (family, flavour) -> the model that SimpleTuner uses if the file names none
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev", ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("sd3", "medium"): "stabilityai/stable-diffusion-3.5-medium", ("sd3", "large"): "stabilityai/stable-diffusion-3.5-large",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
    ("wan", "t2v-480p-1.3b-2.1"): "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", ("wan", "t2v-480p-14b-2.1"): "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    ("wan", "ti2v-5b-2.2"): "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    ("ltxvideo2", "dev"): "Lightricks/LTX-2", ("ltxvideo2", "2.3-dev"): "dg845/LTX-2.3-Diffusers",
    ("ltxvideo", "0.9.5"): "Lightricks/LTX-Video-0.9.5", ("ltxvideo", "0.9.0"): "Lightricks/LTX-Video",
}  # fmt: skip
# findings that do not stop a translation, because the result already does what they advise
HARMLESS_CODES = ("CF020",)
# the tool's name of an optimizer -> Isotype's
_OPTIMIZERS = {
    "adamw_bf16": ("adamw", "bf16 weights with stochastic rounding: precision.preset decides"),
    **transforms.OPTIMIZERS,
    "optimi-adam": "adamw",
    **dict.fromkeys(
        ("adamw_schedulefree+aggressive", "adamw_schedulefree+no_kahan"), "schedule-free"
    ),
    "prodigy": ("prodigy", "Prodigy without SimpleTuner's averages"),
}
# the tool's name of a schedule -> Isotype's
_SCHEDULES = {
    **{
        name: transforms.SCHEDULES[name]
        for name in ("constant", "constant_with_warmup", "linear", "cosine")
    },
    "polynomial": ("linear", "polynomial is not offered; linear is the nearest"),
    "sine": ("cosine", "sine is not offered; cosine is the nearest"),
}


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    values = {source_key.name: source_key.value for source_key in source.keys}
    locations = {
        source_key.name: f"line {source_key.line}: {source_key.name_in_file}"
        for source_key in source.keys
    }
    family = str(values.get("model_family") or "").lower()
    kind = str(values.get("model_type") or "").lower()
    base_precision = str(values.get("base_model_precision") or "no_change").lower()
    control_keys = [
        name
        for name in ("controlnet", "control", "controlnet_model_name_or_path")
        if transforms.is_enabled(values.get(name) or False)
    ]
    if control_keys or "controlnet" in kind:
        location = locations.get(
            "controlnet", locations.get("control", locations.get("model_type", ""))
        )
        return (
            f"{location}: ControlNet is not offered: Isotype trains the denoiser on pictures and"
            " captions"
        )
    if str(values.get("lora_type") or "").lower() == "lycoris" or values.get("lycoris_config"):
        location = locations.get("lora_type", locations.get("lycoris_config", ""))
        return (
            f"{location}: LyCORIS is not offered: adapter.kind is lora; lora_type=standard can be"
            " translated"
        )
    if base_precision not in ("no_change", "") and not any(
        format_name in base_precision for format_name in ("nf4", *DTYPES_ON_LOAD)
    ):
        return (
            f"{locations['base_model_precision']}: {base_precision} is not offered: no_change (bf16), fp8-quanto,"
            " int8-quanto, or nf4-bnb"
        )
    if reason := _video_refusal(family, values, locations):
        return reason
    if family and family not in FAMILIES:
        return f"{locations['model_family']}: {family} is not offered: {', '.join(FAMILIES)}"
    if transforms.is_enabled(values.get("train_text_encoder", False)):
        return (
            f"{locations['train_text_encoder']}: is not carried over: adapter.text_encoders trains"
            " those of SDXL and Stable Diffusion"
        )
    return None


def _video_refusal(family: str, values: dict[str, Any], locations: dict[str, str]) -> str | None:
    """Returns an explanation if the model or a dataset is for videos or audio and cannot be
    trained.
    """
    if family in VIDEO_FAMILIES:
        return (
            f"{locations['model_family']}: {family} is not offered: of the models for videos,"
            f" {' and '.join(CLIP_FAMILIES)} are"
        )
    flavour = str(values.get("model_flavour") or "").lower()
    if family in CLIP_FAMILIES and flavour.startswith(("i2v", "flf2v", "vace", "s2v")):
        return f"{locations['model_flavour']}: {flavour} is not offered: {clips.NO_PICTURE_NOTE}"
    other_kinds = {"audio"} if family in CLIP_FAMILIES else {"audio", "video"}
    for name, value in values.items():
        is_kind = name.startswith(f"{pictures.DATASET_PREFIX}.") and name.endswith(".dataset_type")
        if is_kind and str(value) in other_kinds:
            return (
                f"{locations[name]}: {value} is not offered: {family or 'this model'} is trained on"
                " captions and pictures or clips"
            )
    return None


def _set_clip_defaults(
    draft: ConfigDraft, sources_by_setting: dict[str, list[dict[str, Any]]]
) -> None:
    """Sets `images.frames` if the datasets do not contain the setting `video`, and the size of
    samples that are not squares.
    """
    frame_counts = [
        source["frames"] for sources in sources_by_setting.values() for source in sources
    ]
    if max(frame_counts, default=1) > 1:
        draft.set_default("images.frames", max(frame_counts))
    size = str(draft.source_values.get("validation_resolution") or "")
    width, _, height = size.partition(",")[0].lower().partition("x")
    if width.isdigit() and height.isdigit():
        clips.set_sample_size(draft, int(width), int(height))


def _convert_lr_end(draft: ConfigDraft, source_key: SourceKey) -> None:
    rate = float(draft.source_values.get("learning_rate") or 0)
    if rate and float(source_key.value) <= rate:
        draft.set(
            source_key,
            "train.min_learning_rate",
            float(source_key.value) / rate,
            "a share of the peak",
        )
    else:
        draft.report_not_offered(source_key, "train.min_learning_rate is a share of the peak")


def _convert_base(draft: ConfigDraft, source_key: SourceKey) -> None:
    dtype_name = next(
        (
            dtype_name
            for dtype_name in DTYPES_ON_LOAD
            if dtype_name in str(source_key.value).lower()
        ),
        None,
    )
    if dtype_name is None or str(draft.source_values.get("model_type")).lower() != "lora":
        draft.add_precision_key(source_key)
    else:
        draft.set(source_key, "precision.base", dtype_name, "with one scale per channel")


def _convert_ema(draft: ConfigDraft, source_key: SourceKey) -> None:
    decay = float(draft.source_values.get("ema_decay") or 0.995)
    transforms.set_if_enabled(
        "train.ema", decay, note="kept in fp32, and saved beside the trained result"
    )(draft, source_key)


def _add_prompts(draft: ConfigDraft, source_key: SourceKey, prompts: list[str]) -> None:
    draft.set(source_key, "run.samples", [*draft.settings.get("run.samples", []), *prompts])


def _read_prompts(draft: ConfigDraft, source_key: SourceKey) -> None:
    try:
        content = json.loads(
            (Path(draft.folder) / str(source_key.value)).read_text(encoding="utf-8")
        )
        prompts = [
            str(value) for value in (content.values() if isinstance(content, dict) else content)
        ]
    except (OSError, ValueError, TypeError):
        draft.report_not_offered(
            source_key, "the file is not there: run.samples takes the prompts themselves"
        )
    else:
        _add_prompts(draft, source_key, prompts)


def _parse_pixels(value: Any, kind: object) -> int:
    """Returns the side length of a square picture, in pixels. If `kind` is `area`, `value` is a
    number of megapixels.
    """
    size = float(value)
    return int(size) if str(kind) != "area" else max(64, round((size * 1e6) ** 0.5 / 64) * 64)


def _convert_sample_size(draft: ConfigDraft, source_key: SourceKey) -> None:
    width, _, height = str(source_key.value).partition(",")[0].lower().partition("x")
    if height and height != width:
        draft.report_changed(source_key, f"size: {width}x{height} of each prompt")
    else:
        unit = "pixel" if float(width) > 16 else "area"
        draft.set(source_key, "run.sample_size", _parse_pixels(width, unit))


def _convert_checkpointing_interval(draft: ConfigDraft, source_key: SourceKey) -> None:
    if transforms.parse_number(source_key.value or 0) > 1:
        draft.settings["train.gradient_checkpointing"] = "layers"
        draft.set(source_key, "train.checkpointed_layers", f"every {int(source_key.value)}")
    else:
        draft.report_no_effect(source_key, "every block: the default")


def _convert_targets(draft: ConfigDraft, source_key: SourceKey) -> None:
    if str(source_key.value) == "all":
        draft.set(
            source_key,
            "adapter.targets",
            ATTENTION_TARGETS,
            "attention of picture and text, as `all` means there",
        )
    elif str(source_key.value).startswith("all"):
        draft.set(
            source_key,
            "adapter.targets",
            "all-linear",
            "every linear layer of the denoiser's blocks",
        )
    else:
        draft.report_not_offered(
            source_key, "adapter.targets names the modules; all-linear is used"
        )


def _convert_flavour(draft: ConfigDraft, source_key: SourceKey) -> None:
    model = DEFAULT_MODELS.get(
        (str(draft.source_values.get("model_family")), str(source_key.value))
    )
    if draft.source_values.get("pretrained_model_name_or_path"):
        draft.report_no_effect(source_key, "pretrained_model_name_or_path names the model")
    elif model:
        draft.set(source_key, "model.name", model)
    else:
        draft.report_not_offered(source_key, "put the model's folder or hub id into model.name")


_CACHED_NOTE = "latents and embeddings are kept under a key of all that shaped them: images.cache"
_TABLE_COLUMNS_NOTE = "the source is the table itself; images.columns names its columns"


def _dataset_of_key(draft: ConfigDraft, source_key: SourceKey) -> dict[str, Any]:
    """Returns the dataset to which a key belongs."""
    return pictures.collect_datasets(draft)[int(source_key.name.split(".")[1])]


def _images_setting(entry: dict[str, Any]) -> str:
    if str(entry.get("dataset_type")) == "eval":
        return "images.eval"
    if transforms.is_enabled(entry.get("is_regularisation_data")):
        return "images.regularisation"
    return "images.train"


def _has_instance_prompt(entry: dict[str, Any]) -> bool:
    return str(entry.get("caption_strategy")) == "instanceprompt" or transforms.is_enabled(
        entry.get("only_instance_prompt")
    )


def _convert_dataset(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates one key of one dataset, such as `dataset.0.repeats`."""
    key = source_key.name.split(".", 2)[2]
    entry = _dataset_of_key(draft, source_key)
    kind = str(entry.get("dataset_type", "image"))
    storage = str(entry.get("type", "local"))
    if transforms.is_enabled(entry.get("disabled", entry.get("disable"))):
        draft.report_no_effect(source_key, "the dataset is switched off")
    elif kind in ("text_embeds", "image_embeds", "conditioning_image_embeds") or key.startswith(
        "cache_dir"
    ):
        draft.report_no_effect(source_key, _CACHED_NOTE)
    elif kind == "conditioning" and str(entry.get("conditioning_type")) != "mask":
        draft.report_not_offered(
            source_key,
            f"conditioning of type {entry.get('conditioning_type', 'controlnet')}: only masks",
        )
    elif kind == "conditioning":
        if key == "instance_data_dir":
            draft.set(source_key, "images.masks", str(source_key.value))
        else:
            draft.report_no_effect(source_key, "a mask belongs to the picture of its name")
    elif kind not in ("image", "video", "eval"):
        draft.report_not_offered(source_key, f"{kind} datasets")
    elif storage not in ("local", "csv"):
        draft.report_not_offered(
            source_key,
            f"a dataset of type {storage}: put its pictures into a folder, and the folder into"
            " images.train",
        )
    else:
        pictures.dataset_handler(_DATASET_KEYS)(draft, source_key)


def _convert_folder(draft: ConfigDraft, source_key: SourceKey) -> None:
    draft.set(
        source_key, _images_setting(_dataset_of_key(draft, source_key)), str(source_key.value)
    )


def _convert_caption_strategy(draft: ConfigDraft, source_key: SourceKey) -> None:
    strategy = str(source_key.value)
    if strategy == "textfile":
        draft.report_no_effect(
            source_key, "a .txt beside each picture, a caption a line: what is read by default"
        )
    elif strategy in ("instanceprompt", "parquet", "csv"):
        if strategy == "instanceprompt":
            setting = _images_setting(_dataset_of_key(draft, source_key))
            draft.report_changed(source_key, f"{setting}: caption")
        else:
            draft.report_changed(source_key, _TABLE_COLUMNS_NOTE)
    else:
        draft.report_not_offered(
            source_key, "captions stand in a .txt beside each picture, or in a table's column"
        )


def _convert_resolution(draft: ConfigDraft, source_key: SourceKey) -> None:
    is_dataset_key = source_key.name.startswith(f"{pictures.DATASET_PREFIX}.")
    dataset = _dataset_of_key(draft, source_key) if is_dataset_key else {}
    size = _parse_pixels(
        source_key.value,
        dataset.get("resolution_type", draft.source_values.get("resolution_type", "pixel_area")),
    )
    previous = draft.settings.get("images.resolution")
    if (
        is_dataset_key
        and previous not in (None, size)
        and draft.sources["images.resolution"].name.startswith(f"{pictures.DATASET_PREFIX}.")
    ):
        draft.report_not_offered(
            source_key, f"a run has one resolution, that of the first dataset: {previous}"
        )
    else:
        draft.set(source_key, "images.resolution", size)


def _is_video(draft: ConfigDraft, source_key: SourceKey) -> bool:
    return str(_dataset_of_key(draft, source_key).get("dataset_type")) == "video"


def _frame_count(draft: ConfigDraft, entry: dict[str, Any]) -> int:
    """Returns the number of frames of a dataset's clips; 1 for a dataset of pictures. If the file
    sets none, SimpleTuner uses 5 seconds at `framerate`, which is 25 by default.
    """
    if str(entry.get("dataset_type")) != "video":
        return 1
    settings = entry.get("video")
    settings = settings if isinstance(settings, dict) else {}
    default = 5 * int(draft.source_values.get("framerate") or 25)
    frames = settings.get("num_frames") or settings.get("min_frames") or default
    step = clips.frame_step(draft.source_values.get("model_family"))
    return clips.frame_counts(frames, step)[-1]


def _convert_video(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the settings `num_frames`, `min_frames`, ... of a dataset of videos."""
    entry = _dataset_of_key(draft, source_key)
    notes = [clips.HEAD_NOTE]
    if "num_frames" not in source_key.value:
        notes.append("all clips of a source have the same number of frames")
    if transforms.is_enabled(source_key.value.get("is_i2v")):
        notes.append(clips.NO_PICTURE_NOTE)
    clips.set_frames(draft, source_key, _frame_count(draft, entry), "; ".join(notes))


def _convert_sample_frames(draft: ConfigDraft, source_key: SourceKey) -> None:
    step = clips.frame_step(draft.source_values.get("model_family"))
    draft.set(source_key, "run.sample_frames", clips.frame_counts(source_key.value, step)[-1])


def _is_square_crop(draft: ConfigDraft, source_key: SourceKey) -> bool:
    entry = _dataset_of_key(draft, source_key)
    return (
        transforms.is_enabled(entry.get("crop"))
        and str(entry.get("crop_aspect", "square")) == "square"
    )


def _convert_crop_style(draft: ConfigDraft, source_key: SourceKey) -> None:
    if not transforms.is_enabled(_dataset_of_key(draft, source_key).get("crop", True)):
        draft.report_no_effect(source_key, "without crop")
    elif str(source_key.value) == "random":
        transforms.set_constant("images.crop", 4, pictures.RANDOM_CROPS_NOTE)(draft, source_key)
    else:
        note = "" if source_key.value == "center" else f"{source_key.value} is not offered"
        draft.set(source_key, "images.crop", "center", note)


# reason -> the keys for which it holds, separated by spaces
_DATASET_NO_EFFECT = {
    "images.resolution is a side in pixels": "resolution_type",
    pictures.BUCKETS_NOTE: "crop_aspect_buckets",
    "windows at random are kept, and drawn anew each time: images.crop": (
        "vae_cache_clear_each_epoch"
    ),
    _CACHED_NOTE: (
        "cache_file_suffix text_embeds image_embeds skip_file_discovery preserve_data_backend_cache"
        " default write_batch_size read_batch_size hash_filenames hash_filename"
    ),
    transforms.IRRELEVANT_NOTE: "maximum_image_size target_downsample_size id type dataset_type metadata_backend",
}
# what to use instead -> the keys of a data set that Isotype does not offer
_DATASET_NOT_OFFERED = {
    "captions are taken as they are, a line each": (
        "prepend_instance_prompt caption_shuffle caption_filter_list disable_multiline_split"
    ),
    "no picture is left out for its size: take it out of the folder": (
        "minimum_image_size minimum_aspect_ratio maximum_aspect_ratio"
    ),
}
# key of a data set in the tool's configuration -> the function that translates it
_DATASET_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _DATASET_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _DATASET_NOT_OFFERED),
    **transforms.same_handler(_convert_folder, "instance_data_dir data_dir"),
    "repeats": transforms.report_changed("so many times more than once: repeats of the source"),
    "is_regularisation_data": transforms.report_changed("images.regularisation, where it is on"),
    "caption_strategy": _convert_caption_strategy,
    "instance_prompt": transforms.choose_handler(
        lambda draft, source_key: _has_instance_prompt(_dataset_of_key(draft, source_key)),
        lambda draft, source_key: draft.report_changed(
            source_key,
            f"{_images_setting(_dataset_of_key(draft, source_key))}: caption: {source_key.value}",
        ),
        transforms.report_no_effect("without caption_strategy instanceprompt"),
    ),
    "only_instance_prompt": transforms.report_changed("caption of the source, where it is on"),
    "parquet": transforms.report_changed(_TABLE_COLUMNS_NOTE),
    "resolution": _convert_resolution,
    **transforms.same_handler(
        transforms.choose_handler(
            _is_square_crop,
            transforms.report_no_effect("squares are the default: images.max_aspect"),
            transforms.set_constant(
                "images.max_aspect",
                2.0,
                "aspect buckets; what a picture is longer than 2 : 1 is cut off",
            ),
        ),
        "crop crop_aspect",
    ),
    "crop_style": _convert_crop_style,
    "video": transforms.choose_handler(
        _is_video, _convert_video, transforms.report_no_effect("pictures")
    ),
    "audio": transforms.report_not_offered("videos have no sound"),
    "conditioning_data": transforms.report_changed("images.masks, where it holds masks"),
    "probability": transforms.accept_only(
        "1 1.0", "switched off", "repeats of a source make its pictures come more often"
    ),
}


# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "its datasets are images.*": "data_backend_config",
    "images.resolution is a side in pixels": "resolution_type",
    "LoRA's projections are grouped where they can be: model.optimize": "fuse_qkv_projections",
    "samples are drawn from train.seed, the same at every step": "validation_seed",
    transforms.NO_GPU_COUNT_NOTE: "num_processes",
    _CACHED_NOTE: (
        "vae_* text_encoder_batch_size text_cache_* cache_dir* preserve_data_backend_cache"
        " write_batch_size read_batch_size metadata_update_interval image_processing_batch_size"
        " aws_* compress_disk_cache offload_* quantize_via delete_* skip_file_discovery max_workers"
        " torch_num_threads dataloader_prefetch* text_embeds_* enable_multiprocessing"
    ),
    "nothing is uploaded; a secret stays in the environment": (
        "push_* hub_* tracker_* webhook_* hf_token wandb_* huggingface_token"
    ),
    transforms.IRRELEVANT_NOTE: (
        "model_family aspect_bucket_rounding aspect_bucket_alignment target_downsample_size"
        " instance_prompt lora_type grad_clip_method ema_device ema_cpu_only ema_update_interval"
        " ema_validation flux_guidance_max attention_mechanism train_text_encoder controlnet"
        " control disable_benchmark debug_* print_* i_know_what_i_am_doing disable_*"
        " strict_epoch_limit lora_format trust_remote_code pretrained_t5_model_name_or_path"
        " ramtorch_* override_dataset_config logging_dir dynamo_* env simpletuner_* user_*"
        " enable_xformers_memory_efficient_attention set_grads_to_none enable_watermark"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "pictures of every size are scaled to images.resolution": "minimum_image_size",
    "adapter.dora is for language models": "use_dora",
    pictures.ADAM_SETTINGS_NOTE: "optimizer_config",
    "run.samples takes prompts": "validation_prompt_library",
    "parallel.kind: shard splits the weights over processes": "context_parallel_*",
    "each prompt gives one picture: name it twice in run.samples": "num_validation_images",
    "samples have run.sample_steps, run.sample_size, run.sample_guidance": (
        "validation_* num_eval_images evaluation_type"
    ),
    transforms.NO_SETTING_NOTE: (
        "input_perturbation masked_loss_probability distillation_* tread_config musubi_* sdnq_*"
        " deepspeed_config"
    ),
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **pictures.DIFFUSERS_KEYS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        images="caption_dropout=caption_dropout_probability",
        diffusion="guidance=flux_guidance_value max_text_length=tokenizer_max_length",
        adapter="r=lora_rank alpha=lora_alpha dropout=lora_dropout",
        train="beta1=optimizer_beta1 beta2=optimizer_beta2 eval_every=eval_steps_interval",
        run=(
            "save_every=checkpoint_step_interval sample_every=validation_step_interval "
            "sample_steps=validation_num_inference_steps sample_guidance=validation_guidance"
        ),
    ),
    "model_flavour": _convert_flavour,
    # pictures
    pictures.DATASET_PREFIX: _convert_dataset,
    "resolution": _convert_resolution,
    "ignore_missing_files": transforms.set_if_enabled(
        "images.on_bad_row", "skip", note="up to 5% of the pictures"
    ),
    # adapter
    "model_type": transforms.convert_to(
        "adapter.kind", lambda value: "none" if str(value).lower() == "full" else "lora"
    ),
    **transforms.same_handler(_convert_targets, "flux_lora_target lora_target"),
    "init_lora": pictures.set_start,
    # precision
    **transforms.same_handler(
        transforms.ConfigDraft.add_precision_key,
        "mixed_precision base_model_default_dtype pure_bf16",
    ),
    "base_model_precision": _convert_base,
    "gradient_precision": transforms.choose_handler(
        lambda _, source_key: str(source_key.value).lower() in ("fp32", "float32"),
        transforms.set_constant(
            "precision.grads",
            "fp32",
            "what it meant: gradients of bf16 weights, accumulated in fp32; SimpleTuner accepts and"
            " ignores it",
        ),
        transforms.report_changed("gradients are accumulated in fp32 (precision.grads)"),
    ),
    "pretrained_vae_model_name_or_path": pictures.set_vae,
    "ramtorch": transforms.set_if_enabled("model.offload", "blocks"),
    "vae_dtype": transforms.convert_choice(
        "precision.vae",
        {"fp32": "fp32", "bf16": "bf16"},
        "the default: the VAE computes in fp32",
        fallback="report_no_effect",
    ),
    **transforms.same_handler(
        transforms.accept_only(
            "no_change",
            "text encoders run once, in precision.text_encoder, and are then freed",
            "quantised text encoders; they run once, before the denoiser is loaded, and are then"
            " freed",
        ),
        "text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision"
        " text_encoder_4_precision",
    ),
    # steps
    "num_train_epochs": transforms.convert_count("train.epochs"),
    "lr_scheduler": transforms.schedule_converter(_SCHEDULES),
    "lr_warmup_steps": transforms.choose_handler(
        lambda draft, _: draft.lowercase_value("lr_scheduler") == "constant",
        transforms.report_no_effect("a constant schedule has no warm-up, there too"),
        transforms.convert_number("train.warmup"),
    ),
    "lr_end": _convert_lr_end,
    "optimizer": transforms.convert_choice(
        "train.optimizer", _OPTIMIZERS, transforms.OTHER_OPTIMIZER_NOTE
    ),
    "gradient_checkpointing_interval": _convert_checkpointing_interval,
    "use_ema": _convert_ema,
    "ema_decay": transforms.require_key(
        "use_ema", "on", transforms.report_no_effect("part of train.ema"), "without use_ema"
    ),
    # the objective
    "flow_schedule_shift": transforms.choose_handler(
        lambda _, source_key: transforms.parse_number(source_key.value) > 0,
        transforms.convert_to("diffusion.shift", float),
        transforms.report_changed("diffusion.shift: auto, the scheduler's own"),
    ),
    "flow_schedule_auto_shift": transforms.report_changed(
        "diffusion.shift: auto, the scheduler's own, where it is on"
    ),
    "flow_use_uniform_schedule": transforms.set_if_enabled("diffusion.timesteps", "uniform"),
    "prediction_type": transforms.convert_to(
        "diffusion.objective",
        lambda value: {"epsilon": "epsilon", "v_prediction": "v"}.get(str(value), "auto"),
    ),
    "loss_type": transforms.accept_only("l2", "squared error", "the loss is the squared error"),
    # samples
    "validation_prompt": lambda draft, source_key: _add_prompts(
        draft, source_key, [str(source_key.value)]
    ),
    "user_prompt_library": _read_prompts,
    "validation_guidance_rescale": transforms.accept_only(
        "0 0.0 None False", "switched off", "run.sample_guidance, which is not rescaled"
    ),
    "validation_resolution": _convert_sample_size,
    "framerate": transforms.choose_handler(
        lambda draft, _: str(draft.source_values.get("model_family")) in CLIP_FAMILIES,
        transforms.convert_to("images.frame_rate", float, "of training clips and samples"),
        transforms.report_no_effect(transforms.IRRELEVANT_NOTE),
    ),
    "validation_num_video_frames": _convert_sample_frames,
    "wan_validation_load_other_stage": transforms.report_no_effect(
        "samples use both denoisers of Wan 2.2"
    ),
    "validation_disable": transforms.set_if_enabled("run.sample_every", 0),
    "validation_negative_prompt": transforms.report_changed(
        "guidance starts from the empty prompt"
    ),
    # saving, machine
    "resume_from_checkpoint": transforms.report_changed("isotype train --resume RUN"),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds SimpleTuner's defaults to the new configuration where they differ from the defaults of
    Isotype. Also adds the datasets.
    """
    is_flux = str(source.get("model_family")) == "flux"
    if draft.set_adapter_defaults("none", 16):
        draft.set_defaults(
            {
                "adapter.dropout": 0.1,
                "adapter.targets": ATTENTION_TARGETS if is_flux else ATTENTION_TARGETS[:4],
            }
        )
    pictures.drop_new_adapter_settings(draft)
    draft.set_defaults(
        {
            "train.weight_decay": 1e-2,
            "train.epsilon": 1e-6,
            "images.resolution": 1024,
            "train.clip": 2.0,
        }
    )
    if str(source.get("model_family") or "flux") in FLOW_FAMILIES:
        draft.set_default("diffusion.shift", 3.0)
    if (
        "max_grad_norm" not in draft.source_values
        and str(source.get("grad_clip_method") or "value") == "value"
    ):
        draft.notes.append(
            "train.clip: SimpleTuner clips each value at 2.0; here the norm of all is clipped"
        )
    sources_by_setting: dict[str, list[dict[str, Any]]] = {}
    for entry in pictures.collect_datasets(draft):
        folder = entry.get("instance_data_dir", entry.get("data_dir"))
        setting = _images_setting(entry)
        table = entry.get("parquet")
        is_used = not transforms.is_enabled(entry.get("disabled")) and str(
            entry.get("type", "local")
        ) in (
            "local",
            "csv",
        )
        if (
            folder is not None
            and is_used
            and str(entry.get("dataset_type", "image")) in ("image", "video", "eval")
        ):
            name = (
                table.get("path") if isinstance(table, dict) else entry.get("csv_file")
            ) or folder
            caption = entry.get("instance_prompt") if _has_instance_prompt(entry) else None
            repeats = 1 if setting == "images.eval" else 1 + float(entry.get("repeats") or 0)
            sources_by_setting.setdefault(setting, []).append(
                pictures.picture_source(
                    name, caption=caption, repeats=repeats, frames=_frame_count(draft, entry)
                )
            )
    _set_clip_defaults(draft, sources_by_setting)
    pictures.set_sources(draft, sources_by_setting)
    if "images.train" not in draft.settings and not pictures.collect_datasets(draft):
        dataset_file = draft.source_values.get("data_backend_config") or "data_backend_config"
        draft.notes.append(
            f"the dataset file was not found ({dataset_file}): name your pictures in images.train"
        )
    if "images.eval" not in draft.settings:
        draft.set_default("images.eval_split", 0.0)  # SimpleTuner trains on every picture
    if "train.steps" in draft.settings:
        draft.settings.pop("train.epochs", None)
