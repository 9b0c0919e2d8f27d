"""Translates a training command of musubi-tuner to an Isotype configuration, with the TOML files
that describe the run and its datasets.

Source  musubi-tuner 30c658c
"""

from __future__ import annotations

from typing import Any

from . import clips, kohya, pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey

_OTHER_MODELS = ("hv_train", "hv_1_5_train", "fpack_train", "hidream_o1_train")
_WAN_MODELS = {
    "t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    **dict.fromkeys(("t2v-14b", "t2i-14b"), "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    "t2v-a14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
}
_TWO_EXPERT_TASK = "t2v-a14b"


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method or a model that Isotype does not
    offer. Otherwise returns None.
    """
    program = source.method.rpartition("/")[2]
    task = str(source.get("task") or "").lower()
    if program.startswith(_OTHER_MODELS):
        return f"{program}: is not offered: of the models for videos, Wan and LTX-Video are"
    if program.startswith("wan") and task and task not in _WAN_MODELS:
        return (
            f"task: {task} is not offered: {', '.join(_WAN_MODELS)} are, which generate videos from"
            " text"
        )
    return kohya.refusal_reason(source)


def _convert_task(draft: ConfigDraft, source_key: SourceKey) -> None:
    task = str(source_key.value).lower()
    draft.set(source_key, "model.name", _WAN_MODELS[task], "the pipeline in diffusers' format")
    if task != _TWO_EXPERT_TASK:
        return
    other_denoiser = draft.source_values.get("dit_high_noise")
    trains_high_noise = other_denoiser is None and (
        float(draft.source_values.get("min_timestep") or 0) >= 500
        or clips.is_high_noise(draft.source_values.get("dit", ""))
    )
    draft.settings["diffusion.expert"] = "high_noise" if trains_high_noise else "low_noise"


def _convert_extraction(draft: ConfigDraft, source_key: SourceKey) -> None:
    if source_key.value == "head":
        draft.report_no_effect(source_key, f"as here: {clips.HEAD_NOTE}")
    elif source_key.value == "full":
        draft.report_changed(
            source_key,
            "a clip has the same number of frames as all others of its source, which is max_frames;"
            " shorter videos cannot be used",
        )
    else:
        draft.report_not_offered(source_key, f"{source_key.value}: {clips.OTHER_PARTS_NOTE}")


def _clip_lengths(dataset: dict[str, Any]) -> list[int]:
    """Returns the lengths, in frames, of the clips that are cut from a dataset's videos. musubi-tuner also uses
    the first frame of a video as a picture, which Isotype does not offer.
    """
    if dataset.get("frame_extraction") == "full":
        counts = clips.frame_counts(dataset.get("max_frames", 129), 4)
    else:
        counts = clips.frame_counts(dataset.get("target_frames", 1), 4)
    return [count for count in counts if count > 1]


def _convert_target_frames(draft: ConfigDraft, source_key: SourceKey) -> None:
    dataset = dict(clips.dataset_of_key(draft, source_key))
    counts = _clip_lengths(dataset)
    if dataset.get("frame_extraction") == "full":
        draft.report_no_effect(source_key, "frame_extraction is full: max_frames decides")
        return
    if not counts:
        draft.report_not_offered(
            source_key,
            "a picture of a video's first frame: extract the frames, and train on the pictures",
        )
        return
    notes = []
    if len(counts) > 1:
        notes.append(f"one entry of images.train for each of {counts}")
    if 1 in clips.frame_counts(source_key.value, 4):
        notes.append("1 is left out: the first frame of a video is not used as a picture")
    clips.set_frames(draft, source_key, max(counts), "; ".join(notes))


def _convert_max_frames(draft: ConfigDraft, source_key: SourceKey) -> None:
    dataset = dict(clips.dataset_of_key(draft, source_key))
    if dataset.get("frame_extraction") == "full":
        clips.set_frames(draft, source_key, max(_clip_lengths(dataset)), "1 plus a multiple of 4")
    else:
        draft.report_no_effect(source_key, "without frame_extraction: full")


def _convert_resolution(draft: ConfigDraft, source_key: SourceKey) -> None:
    side = _side(source_key.value)
    largest = max(side, int(draft.settings.get("images.resolution", 0)))
    note = "the side of a square with about as many pixels"
    draft.set(source_key, "images.resolution", largest, note)


def _side(resolution: Any) -> int:
    width, height = resolution if isinstance(resolution, list) else (resolution, resolution)
    return clips.area_side(width, height)


def _is_video_dataset(draft: ConfigDraft, source_key: SourceKey) -> bool:
    dataset = clips.dataset_of_key(draft, source_key)
    return "video_directory" in dataset or "video_jsonl_file" in dataset


# reason -> the keys for which it holds, separated by spaces
_DATASET_NO_EFFECT = {
    pictures.CACHED_NOTE: "cache_directory",
    transforms.IRRELEVANT_NOTE: "debug_dataset caption_extension bucket_no_upscale",
    clips.FRAME_RATE_NOTE: "source_fps",
}
# what to use instead -> the keys of a data set that Isotype does not offer
_DATASET_NOT_OFFERED = {
    clips.OTHER_PARTS_NOTE: "frame_stride frame_sample",
    "the pictures before the edit have the size of the edited picture": (
        "control_resolution no_resize_control"
    ),
    "settings of FramePack and Qwen-Image-Layered": "fp_* multiple_target",
}
# key of a data set in the tool's configuration -> the function that translates it
_DATASET_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _DATASET_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _DATASET_NOT_OFFERED),
    **transforms.same_handler(
        transforms.report_changed("images.train"),
        "video_directory video_jsonl_file image_directory image_jsonl_file",
    ),
    "control_directory": transforms.choose_handler(
        _is_video_dataset,
        transforms.report_not_offered("a video that controls the generated video"),
        transforms.report_changed("controls of the source"),
    ),
    "num_repeats": transforms.report_changed("repeats of the source"),
    "batch_size": transforms.convert_count("train.batch_size"),
    "resolution": _convert_resolution,
    "enable_bucket": transforms.set_constant("images.max_aspect", 2.0, "aspect buckets"),
    "target_frames": _convert_target_frames,
    "max_frames": _convert_max_frames,
    "frame_extraction": _convert_extraction,
}
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "the pipeline of model.name contains these models": (
        "vae t5 clip text_encoder* llm* dit_dtype vae_dtype fp8_t5 fp8_llm"
    ),
    "latents and texts are encoded one at a time, before the denoiser is loaded": (
        "vae_cache_cpu vae_chunk_size vae_tiling vae_spatial_tile_sample_min_size"
    ),
    "fp8 always has one scale per channel": "fp8_scaled",
    "the other denoiser is loaded only for samples": "offload_inactive_dit",
    "the noise level at which the denoisers change is in the pipeline's files": "timestep_boundary",
    "noise levels are drawn from the distribution within the limits": "preserve_distribution_shape",
    transforms.IRRELEVANT_NOTE: (
        "flash_attn sage_attn flash3 split_attn compile* cuda_* show_timesteps task dit_in_channels"
        " force_v2_1_time_embedding disable_numpy_memmap use_pinned_memory_for_block_swap"
        " block_swap_* img_in_txt_in_offloading async_upload num_timestep_buckets save_last_*"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    clips.NO_PICTURE_NOTE: "one_frame",
    "activations are recomputed: train.gradient_checkpointing": "gradient_checkpointing_cpu_offload",
    "merge the LoRA into the pipeline first": "base_weights base_weights_multiplier",
    "samples are drawn at step 0 and every run.sample_every steps": "sample_at_first",
}
# the tool's distribution of noise levels -> Isotype's
_TIMESTEPS = {
    "sigmoid": "logit_normal",
    **dict.fromkeys(
        ("shift", "flux_shift", "qwen_shift", "flux2_shift", "logsnr", "qinglong_flux"),
        ("logit_normal", "the shift is diffusion.shift"),
    ),
    **dict.fromkeys(("uniform", "sigma"), "uniform"),
}
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **kohya.HANDLERS,
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    pictures.DATASET_PREFIX: pictures.dataset_handler(_DATASET_KEYS),
    "task": _convert_task,
    "dit": transforms.report_changed(
        "model.name is the pipeline in diffusers' format; it can also be a checkpoint in one file"
    ),
    "dit_high_noise": transforms.report_not_offered(clips.ONE_EXPERT_NOTE.format("high_noise")),
    "fp8_base": transforms.set_if_enabled(
        "precision.base", "fp8", note="with one scale per channel"
    ),
    "blocks_to_swap": transforms.set_constant(
        "model.offload", "blocks", "the weights of all blocks are in host memory"
    ),
    "timestep_sampling": transforms.convert_choice(
        "diffusion.timesteps", _TIMESTEPS, pictures.TIMESTEPS_NOTE
    ),
    "weighting_scheme": transforms.accept_only(
        "none", "every noise level counts alike", "diffusion.timesteps: logit_normal or mode"
    ),
    **transforms.copy_values(diffusion="logit_mean logit_std mode_scale"),
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds musubi-tuner's defaults to the new configuration where they differ from the defaults of
    Isotype. Also adds the datasets.
    """
    sources = {"images.train": [*_sources(draft)]}
    image_defaults = {"images.resolution": _side([960, 544]), "images.max_aspect": 2.0}
    draft.set_defaults(pictures.COMMON_DEFAULTS | image_defaults)
    pictures.set_sources(draft, sources)
    if all(key.name.startswith(f"{pictures.DATASET_PREFIX}.") for key in source.keys):
        draft.notes.append("a dataset file: it has no settings of the model and of the training")
        return
    program = source.method.rpartition("/")[2]
    is_full_training = bool(program) and "train_network" not in program
    has_adapter = draft.set_adapter_defaults("none" if is_full_training else "lora", 4, 1.0)
    if has_adapter:
        draft.set_default("run.adapter_format", "comfyui")
    else:
        pictures.drop_adapter_files(draft)
    pictures.drop_text_encoders(draft)
    pictures.drop_new_adapter_settings(draft)
    dtype_name = source.get("mixed_precision") or source.get("launcher.mixed_precision")
    is_half = transforms.is_enabled(source.get("full_bf16"))
    pictures.set_default_preset(draft, dtype_name, half_weights=is_half)
    if draft.settings.get("diffusion.timesteps") != "logit_normal":
        for name in ("logit_mean", "logit_std"):
            draft.settings.pop(f"diffusion.{name}", None)
    if draft.settings.get("diffusion.timesteps") != "mode":
        draft.settings.pop("diffusion.mode_scale", None)
    defaults = {
        "train.batch_size": 1,
        "train.weight_decay": 0.01,
        "train.learning_rate": 2e-6,
        "diffusion.timesteps": "uniform",
    }
    if "diffusion.shift" not in draft.settings and "flux_shift" not in str(
        source.get("timestep_sampling")
    ):
        defaults["diffusion.shift"] = 1.0
    draft.set_defaults(defaults)
    if "train.epochs" not in draft.settings:
        draft.set_default("train.steps", 1600)
    if "diffusion.expert" in draft.settings:
        # the run draws only the noise levels for which its denoiser is used
        for name in ("least_noise", "most_noise"):
            draft.settings.pop(f"diffusion.{name}", None)


def _sources(draft: ConfigDraft) -> list[dict[str, Any]]:
    sources = []
    for dataset in pictures.collect_datasets(draft):
        resolution = [_side(dataset["resolution"])] if dataset.get("resolution") else ()
        repeats = dataset.get("num_repeats")
        videos = dataset.get("video_directory") or dataset.get("video_jsonl_file")
        images = dataset.get("image_directory") or dataset.get("image_jsonl_file")
        if videos:
            sources += [
                pictures.picture_source(
                    videos, repeats=repeats, resolution=resolution, frames=frames
                )
                for frames in _clip_lengths(dataset)
            ]
        elif images:
            source = pictures.picture_source(images, repeats=repeats, resolution=resolution)
            if dataset.get("control_directory"):
                source["controls"] = str(dataset["control_directory"])
            sources.append(source)
    return sources
