"""Translates a TOML file of diffusion-pipe to an Isotype configuration, with the dataset file that
it names.

Source  diffusion-pipe 8f83dbf
"""

from __future__ import annotations

import re
from typing import Any

from . import clips, pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey

_OTHER_MODELS = {
    "hunyuan-video": "", "hunyuan-video-15": "", "cosmos": "", "cosmos_predict2": "", "ltx2": "", "hunyuan_image": "",
    "omnigen2": "", "minimax_h3": "",
}  # fmt: skip
_WAN_FOLDER = re.compile(r"^Wan2\.[12]-(T2V|TI2V)-\w[\w.]*$", re.I)


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method or a model that Isotype does not
    offer. Otherwise returns None.
    """
    model = str(source.get("model.type") or "").lower()
    adapter = str(source.get("adapter.type") or "lora").lower()
    folder = _folder_name(source.get("model.ckpt_path"))
    if model in _OTHER_MODELS:
        return (
            f"model.type: {model} is not offered: of the models for videos, wan and ltx-video are"
        )
    if model == "wan" and re.search("i2v|flf2v", folder, re.I) and "ti2v" not in folder.lower():
        return f"model.ckpt_path: {folder}: only models that generate videos from text are offered"
    if adapter not in ("lora", "lokr"):
        return f"adapter.type: {adapter} is not offered: adapter.kind is lora or lokr"
    return None


def _folder_name(path: object) -> str:
    return str(path or "").rstrip("/").rpartition("/")[2]


def _convert_wan_folder(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the folder of Wan's original files to the same model in diffusers' format."""
    name = _folder_name(source_key.value)
    if _WAN_FOLDER.match(name):
        note = "the same model in diffusers' format"
        draft.set(source_key, "model.name", f"Wan-AI/{name}-Diffusers", note)
    else:
        draft.report_not_offered(source_key, "model.name: the model in diffusers' format")
    if "A14B" in name:
        is_high = clips.is_high_noise(draft.source_values.get("model.transformer_path", ""))
        lowest = float(draft.source_values.get("model.min_t") or 0)
        is_high = is_high or lowest >= 0.5
        draft.settings["diffusion.expert"] = "high_noise" if is_high else "low_noise"
        other = "low_noise" if is_high else "high_noise"
        draft.notes.append(f"diffusion.expert: {clips.ONE_EXPERT_NOTE.format(other)}")


def _convert_noise_limit(target: str) -> transforms.Handler:
    """Returns a handler for a limit of the noise levels. A denoiser of Wan 2.2 has its own limits,
    which the run reads from the pipeline.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if "A14B" in _folder_name(draft.source_values.get("model.ckpt_path")):
            draft.report_changed(source_key, "the denoiser of diffusion.expert has its own limits")
        else:
            draft.set(source_key, target, float(source_key.value))

    return handler


def _clip_length(draft: ConfigDraft, dataset: dict[str, Any]) -> int:
    """Returns the number of frames of a directory's clips; 1 for a directory of pictures.
    diffusion-pipe puts each video into the longest bucket that it fills. The shortest bucket of
    clips is used, because every video fills it.
    """
    step = clips.frame_step(draft.source_values.get("model.type"))
    counts = [
        count for count in clips.frame_counts(dataset.get("frame_buckets", 1), step) if count > 1
    ]
    if not counts or clips.has_no_videos(dataset.get("path"), draft.folder):
        return 1
    return counts[0]


def _convert_frame_buckets(draft: ConfigDraft, source_key: SourceKey) -> None:
    dataset = dict(clips.dataset_of_key(draft, source_key))
    buckets = source_key.value if isinstance(source_key.value, list) else [source_key.value]
    note = ""
    if sum(bucket > 1 for bucket in buckets) > 1:
        note = (
            "the shortest of them, which every video has; clips of several lengths need several"
            " entries of images.train"
        )
    clips.set_frames(draft, source_key, _clip_length(draft, dataset), note)


def _resolutions(draft: ConfigDraft, value: Any) -> list[int]:
    """Returns the sides of squares with about as many pixels as the resolutions, in ascending
    order. A resolution is a side, or a width and a height.
    """
    multiple = 32 if clips.frame_step(draft.source_values.get("model.type")) == 8 else 16
    sides = set()
    for resolution in value if isinstance(value, list) else [value]:
        width, height = resolution if isinstance(resolution, list) else (resolution, resolution)
        sides.add(clips.area_side(width, height, multiple))
    return sorted(sides)


def _convert_resolutions(draft: ConfigDraft, source_key: SourceKey) -> None:
    sides = _resolutions(draft, source_key.value)
    largest = max(*sides, int(draft.settings.get("images.resolution", 0)))
    note = f"resolution of the source: {sides}" if sides != [largest] else ""
    draft.set(source_key, "images.resolution", largest, note)


def _convert_aspect(draft: ConfigDraft, source_key: SourceKey) -> None:
    ratio = float(source_key.value)
    largest = max(ratio, 1 / ratio, float(draft.settings.get("images.max_aspect", 1.0)))
    draft.set(source_key, "images.max_aspect", largest)


# reason -> the keys for which it holds, separated by spaces
_DATASET_NO_EFFECT = {
    pictures.BUCKETS_NOTE: "num_ar_buckets",
    transforms.IRRELEVANT_NOTE: "cache_shuffle_delimiter shuffle_metadata online_captions",
}
# what to use instead -> the keys of a data set that Isotype does not offer
_DATASET_NOT_OFFERED = {
    "images.max_aspect and images.resolution decide the sizes": "ar_buckets size_buckets",
    "images.trigger: a word before every caption": "caption_prefix",
    "one mask for all pictures: give each picture its own in images.masks": "default_mask_file",
    "images.limit uses the first pictures": "subsample_ratio",
}
# key of a data set in the tool's configuration -> the function that translates it
_DATASET_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _DATASET_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _DATASET_NOT_OFFERED),
    "path": transforms.report_changed("images.train"),
    "num_repeats": transforms.report_changed("repeats of the source"),
    "mask_path": transforms.choose_handler(
        lambda draft, source_key: (
            _clip_length(draft, dict(clips.dataset_of_key(draft, source_key))) == 1
        ),
        transforms.convert_to("images.masks", str),
        transforms.report_not_offered("a mask for the loss of clips"),
    ),
    "control_path": transforms.report_changed("controls of the source"),
    "resolutions": _convert_resolutions,
    "enable_ar_bucket": transforms.choose_handler(
        lambda _, source_key: transforms.is_enabled(source_key.value),
        transforms.report_changed("images.max_aspect"),
        transforms.set_constant("images.max_aspect", 1.0, "squares"),
    ),
    "min_ar": _convert_aspect,
    "max_ar": _convert_aspect,
    "frame_buckets": _convert_frame_buckets,
    "cache_shuffle_num": transforms.choose_handler(
        lambda _, source_key: int(source_key.value) > 0,
        transforms.convert_number("images.tag_orders"),
        transforms.report_no_effect("switched off"),
    ),
    "shuffle_tags": pictures.set_tag_orders,
    "skip_empty_caption": transforms.convert_to(
        "images.uncaptioned", lambda value: "skip" if transforms.is_enabled(value) else "empty"
    ),
}
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "its directories are images.train": "dataset",
    "the pipeline of model.name contains these models": (
        "model.vae_path model.llm_path model.llama3_path model.t5_path model.clip_path"
        " model.byt5_path model.text_encoder_path model.text_encoder* model.llama3_4bit"
    ),
    pictures.CACHED_NOTE: (
        "caching_batch_size map_num_proc regenerate_cache model.cache_text_embeddings"
    ),
    "checkpoints are always written: run.save_every": (
        "checkpoint_every_n_minutes checkpoint_every_n_epochs resume_from_checkpoint"
    ),
    transforms.NO_GPU_COUNT_NOTE: "pipeline_stages partition_method partition_split",
    "samples and evaluations use the memory that the plan counts": "disable_block_swap_for_eval",
    "precision.save: adapters are fp32": "save_dtype adapter.dtype",
    transforms.IRRELEVANT_NOTE: (
        "steps_per_print logging_steps compile reentrant_activation_checkpointing x_axis_examples"
        " monitoring.wandb_* monitoring.log_dir eval_gradient_accumulation_steps"
        " eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu"
        " eval_image_micro_batch_size_per_gpu model.type"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "images.eval names a folder of clips or pictures": "eval_datasets",
    "run.adapters_every counts steps": "save_every_n_epochs save_every_n_examples",
    "train.eval_every counts steps": "eval_every_n_epochs eval_every_n_examples",
    "all rows of a step are counted by train.batch_size": "image_micro_batch_size_per_gpu",
    "train.learning_rate and train.schedule decide": "force_constant_lr",
    "adapter.targets names the modules": "adapter.exclude_modules",
    "merge the LoRA into the pipeline first": "adapter.fuse_adapters model.merge_adapters",
    clips.NO_PICTURE_NOTE: "model.first_frame_conditioning_p",
    "images.caption_dropout leaves captions out": "uncond_fraction model.uncond_fraction",
    pictures.ADAM_SETTINGS_NOTE: "optimizer.*",
}
# the tool's name of an optimizer -> Isotype's
_OPTIMIZERS = {
    **transforms.OPTIMIZERS,
    **dict.fromkeys(("adamw_optimi", "genericoptim"), "adamw"),
    "adamw8bitkahan": "adamw8bit",
}
_LOSS_NOTE = "with diffusion.loss: huber"


def _convert_betas(draft: ConfigDraft, source_key: SourceKey) -> None:
    draft.settings["train.beta2"] = float(source_key.value[1])
    draft.set(source_key, "train.beta1", float(source_key.value[0]), "and train.beta2")


def _convert_huber(draft: ConfigDraft, source_key: SourceKey) -> None:
    draft.settings["diffusion.loss"] = "huber"
    draft.set(source_key, "diffusion.huber_c", float(source_key.value), _LOSS_NOTE)


# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        model="name=model.diffusers_path name=model.checkpoint_path",
        diffusion=(
            "shift=model.shift logit_std=model.sigmoid_scale guidance=model.guidance"
            " max_text_length=model.max_sequence_length"
        ),
        adapter="r=adapter.rank alpha=adapter.alpha dropout=adapter.dropout",
        train=(
            "epochs steps=max_steps batch_size=micro_batch_size_per_gpu"
            " accumulate=gradient_accumulation_steps clip=gradient_clipping warmup=warmup_steps"
            " weight_decay=optimizer.weight_decay epsilon=optimizer.eps"
            " eval_every=eval_every_n_steps seed"
        ),
        run="folder=output_dir adapters_every=save_every_n_steps",
    ),
    pictures.DATASET_PREFIX: pictures.dataset_handler(_DATASET_KEYS, "dataset file"),
    # model and adapter
    "model.ckpt_path": _convert_wan_folder,
    **transforms.same_handler(
        transforms.report_changed(
            "model.name is the pipeline in diffusers' format; it can also be a checkpoint in one"
            " file"
        ),
        "model.transformer_path model.single_file_path model.diffusion_model",
    ),
    **transforms.same_handler(
        transforms.choose_handler(
            lambda _, source_key: "float8" in str(source_key.value),
            transforms.set_constant("precision.base", "fp8", "with one scale per channel"),
            pictures.note_precision_key,
        ),
        "model.transformer_dtype model.diffusion_model_dtype model.unet_dtype",
    ),
    "model.dtype": pictures.note_precision_key,
    "adapter.type": transforms.choose_handler(
        lambda _, source_key: str(source_key.value).lower() == "lokr",
        pictures.set_lokr,
        transforms.report_no_effect(pictures.PEFT_LORA_NOTE),
    ),
    "adapter.decompose_factor": transforms.convert_number("adapter.factor"),
    "adapter.init_from_existing": pictures.set_start,
    # steps
    "blocks_to_swap": transforms.set_constant(
        "model.offload", "blocks", "the weights of all blocks are in host memory"
    ),
    "activation_checkpointing": transforms.convert_to(
        "train.gradient_checkpointing",
        lambda value: "none" if value in transforms.OFF_VALUES else "layers",
    ),
    "lr_scheduler": transforms.convert_schedule,
    "optimizer.type": transforms.convert_choice(
        "train.optimizer", _OPTIMIZERS, transforms.OTHER_OPTIMIZER_NOTE
    ),
    "optimizer.lr": pictures.convert_rate,
    "optimizer.betas": _convert_betas,
    "optimizer.stabilize": transforms.report_no_effect("without it the same here"),
    "pseudo_huber_c": _convert_huber,
    "model.v_pred": transforms.set_if_enabled("diffusion.objective", "v"),
    "model.min_snr_gamma": pictures.convert_min_snr,
    "model.timestep_sample_method": transforms.convert_choice(
        "diffusion.timesteps",
        {"logit_normal": "logit_normal", "uniform": "uniform"},
        pictures.TIMESTEPS_NOTE,
    ),
    **transforms.same_handler(
        transforms.report_changed("diffusion.shift: auto, the scheduler's own, where it is on"),
        "model.flux_shift model.lumina_shift model.image_shift",
    ),
    "model.min_t": _convert_noise_limit("diffusion.least_noise"),
    "model.max_t": _convert_noise_limit("diffusion.most_noise"),
    "video_clip_mode": transforms.accept_only(
        "single_beginning", f"as here: {clips.HEAD_NOTE}", clips.OTHER_PARTS_NOTE
    ),
    "eval_before_first_step": transforms.report_no_effect("the first evaluation is at step 0"),
    "monitoring.enable_wandb": transforms.set_if_enabled("run.trackers", ["wandb"]),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds diffusion-pipe's defaults to the new configuration where they differ from the defaults
    of Isotype. Also adds the directories of the dataset file.
    """
    _add_sources(draft)
    if not any(key.name.startswith("model.") for key in source.keys):
        draft.notes.append("a dataset file: it has no settings of the model and of the training")
        return
    has_adapter = any(key.name.startswith("adapter.") for key in source.keys)
    kind = "lora" if has_adapter else "none"
    if draft.set_adapter_defaults(kind, 32):
        draft.set_default("run.adapter_format", "comfyui")
    else:
        pictures.drop_adapter_files(draft)
    if draft.settings.get("adapter.kind") != "lokr":
        draft.settings.pop("adapter.factor", None)
    pictures.drop_new_adapter_settings(draft)
    pictures.set_default_preset(draft, source.get("model.dtype") or "bf16", half_weights=True)
    draft.set_default("train.batch_size", 1)
    if "train.steps" in draft.settings:
        draft.settings.pop("train.epochs", None)


def _add_sources(draft: ConfigDraft) -> None:
    draft.set_defaults(pictures.COMMON_DEFAULTS | {"images.uncaptioned": "skip"})
    sources = []
    for dataset in pictures.collect_datasets(draft):
        if "path" not in dataset:
            continue
        entry = pictures.picture_source(
            dataset["path"],
            repeats=dataset.get("num_repeats"),
            resolution=_resolutions(draft, dataset["resolutions"])
            if "resolutions" in dataset
            else (),
            frames=_clip_length(draft, dataset),
        )
        if dataset.get("control_path"):
            entry["controls"] = str(dataset["control_path"])
        sources.append(entry)
    pictures.set_sources(draft, {"images.train": sources})
