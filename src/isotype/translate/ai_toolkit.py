"""Translates the YAML file of an ai-toolkit job to an Isotype configuration. Only the first process
of the job is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import clips, pictures, transforms
from .source import Source
from .transforms import ConfigDraft, SourceKey


def refusal_reason(source: Source) -> str | None:
    """Returns an explanation if the file uses a training method that Isotype does not offer.
    Otherwise returns None.
    """
    kind = str(source.get("type") or "sd_trainer")
    network = str(source.get("network.type") or "lora").lower()
    if kind not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        return f"config.process[0].type: {kind} is not offered: sd_trainer is"
    if network not in ("lora", "lokr"):
        return f"network.type: {network} is not offered: adapter.kind is lora or lokr"
    architecture = str(source.get("model.arch") or "").lower()
    if architecture.startswith("wan") and architecture.endswith("i2v"):
        return f"model.arch: {architecture} is not offered: {clips.NO_PICTURE_NOTE}"
    return None


def _list_paths(entry: Mapping[str, Any], key: str) -> list[str]:
    """Returns the paths of the pictures before the edit. ai-toolkit has one path or a list of paths
    at `key`, or one path at each of the keys with a number (`control_path_1`, ...).
    """
    first = entry.get(f"{key}_1") or entry.get(key)
    paths = first if isinstance(first, list) else [first]
    return [str(path) for path in (*paths, entry.get(f"{key}_2"), entry.get(f"{key}_3")) if path]


def _convert_samples(draft: ConfigDraft, source_key: SourceKey) -> None:
    entries = source_key.value if isinstance(source_key.value, list) else [source_key.value]
    trigger = str(draft.source_values.get("trigger_word") or "")
    seed = draft.source_values.get("sample.seed")
    counts_up = transforms.is_enabled(draft.source_values.get("sample.walk_seed"))
    samples: list[Any] = []
    for i, entry in enumerate(entries):
        prompt = entry.get("prompt", "") if isinstance(entry, dict) else entry
        text = str(prompt).replace("[trigger]", trigger)
        sample: dict[str, Any] = {"prompt": text}
        if isinstance(entry, dict) and (controls := _list_paths(entry, "ctrl_img")):
            sample["control"] = controls[0] if len(controls) == 1 else controls
        if isinstance(entry, dict) and "num_frames" in entry:
            sample["frames"] = _frame_count(draft, entry["num_frames"])
        if negative := draft.source_values.get("sample.neg"):
            sample["negative"] = str(negative)
        if seed is not None:
            sample["seed"] = int(seed) + (i if counts_up else 0)
        samples.append(sample if len(sample) > 1 else text)
    draft.set(source_key, "run.samples", samples, "with their seeds")


def _convert_sample_size(draft: ConfigDraft, source_key: SourceKey) -> None:
    width, height = _sample_size(draft)
    if width == height:
        draft.set(source_key, "run.sample_size", width)
    else:
        draft.report_changed(source_key, f"size: {width}x{height} of each prompt")


def _sample_size(draft: ConfigDraft) -> tuple[int, int]:
    """Returns the width and height of samples. A side that is not set has ai-toolkit's default."""
    width, height = (
        int(draft.source_values.get(f"sample.{side}") or 512) for side in ("width", "height")
    )
    return width, height


def _frame_count(draft: ConfigDraft, value: Any) -> int:
    return clips.frame_counts(value, clips.frame_step(draft.source_values.get("model.arch")))[-1]


_SHRINK_NOTE = (
    f"a clip has {clips.HEAD_NOTE}; ai-toolkit spreads them over the whole video: cut the videos to"
    " the length of a clip"
)


def _convert_frames(draft: ConfigDraft, source_key: SourceKey) -> None:
    frames = _frame_count(draft, source_key.value)
    dataset = clips.dataset_of_key(draft, source_key)
    notes = (
        []
        if frames == source_key.value
        else ["1 plus a multiple of the frames that the VAE combines"]
    )
    if transforms.is_enabled(dataset.get("shrink_video_to_frames", True)):
        notes.append(_SHRINK_NOTE)
    clips.set_frames(draft, source_key, frames, "; ".join(notes))


def _convert_sample_frames(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the number of frames of a sample. If the run trains on pictures, a sample has one
    frame by default.
    """
    frames = _frame_count(draft, source_key.value)
    counts = [
        _frame_count(draft, entry.get("num_frames", 1))
        for entry in pictures.collect_datasets(draft)
    ]
    if frames == max(counts, default=1):
        draft.report_no_effect(source_key, "as many as the training clips have: the default")
    else:
        draft.set(source_key, "run.sample_frames", frames)


def _convert_frame_rate(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates the frame rate of a dataset. ai-toolkit uses it only if it does not spread the
    frames of a clip over the whole video.
    """
    dataset = clips.dataset_of_key(draft, source_key)
    if _frame_count(draft, dataset.get("num_frames", 1)) == 1:
        draft.report_no_effect(source_key, "pictures")
    elif transforms.is_enabled(dataset.get("shrink_video_to_frames", True)):
        draft.report_no_effect(source_key, "with shrink_video_to_frames")
    else:
        draft.set(source_key, "images.frame_rate", float(source_key.value))


def _convert_resolution(draft: ConfigDraft, source_key: SourceKey) -> None:
    resolutions = _resolutions(draft, source_key.value)
    pictures.convert_resolution(draft, replace(source_key, value=resolutions))


def _resolutions(draft: ConfigDraft, value: Any) -> list[int]:
    """Returns the resolutions in ascending order. For Wan and LTX-2, they are rounded down to
    multiples of the side of a token in pixels.
    """
    sides = pictures.parse_resolutions(value)
    architecture = draft.lowercase_value("model.arch")
    if architecture.startswith(("wan", "ltx")):
        multiple = 16 if architecture.startswith("wan") else 32
        sides = sorted({side // multiple * multiple for side in sides})
    return sides


_EXPERT_KEYS = {"high_noise": "train_high_noise", "low_noise": "train_low_noise"}


def _convert_expert(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates which denoiser of Wan 2.2 is trained. ai-toolkit trains both by default."""
    if draft.lowercase_value("model.arch") != "wan22_14b":
        draft.report_no_effect(source_key, transforms.IRRELEVANT_NOTE)
        return
    expert = _trained_expert(draft)
    if not transforms.is_enabled(source_key.value):
        draft.report_no_effect(source_key, "switched off")
    elif source_key.name.endswith(_EXPERT_KEYS[expert]):
        draft.set(source_key, "diffusion.expert", expert)
    else:
        other = "high_noise" if expert == "low_noise" else "low_noise"
        draft.report_not_offered(source_key, clips.ONE_EXPERT_NOTE.format(other))


def _trained_expert(draft: ConfigDraft) -> str:
    trains_low_noise = draft.source_values.get("model.model_kwargs.train_low_noise", True)
    return "low_noise" if transforms.is_enabled(trains_low_noise) else "high_noise"


_FULL_RANK = 100_000  # larger than the side of any weight


def _refuse_if_enabled(alternative: str) -> transforms.Handler:
    """Returns a handler that reports that Isotype does not offer this feature, if the key is
    switched on. The handler is used for keys that can also be switched off by values that are not
    in `OFF_VALUES`.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        if transforms.is_enabled(source_key.value):
            draft.report_not_offered(source_key, alternative)
        else:
            draft.report_no_effect(source_key, "switched off")

    return handler


_FAMILIES_WITHOUT_CLIP = (
    "model.is_flux",
    "model.is_v3",
    "model.is_auraflow",
    "model.is_pixart",
    "model.is_lumina2",
)


def _require_clip(handle: transforms.Handler) -> transforms.Handler:
    """Returns a handler for a key that only SDXL and Stable Diffusion support. For these families,
    and if the file names no family, the handler calls `handle`. For other families, the handler
    reports that Isotype does not offer this feature, if the key is switched on.
    """

    def handler(draft: ConfigDraft, source_key: SourceKey) -> None:
        is_other_family = any(
            transforms.is_enabled(draft.source_values.get(key)) for key in _FAMILIES_WITHOUT_CLIP
        )
        has_clip = (
            draft.lowercase_value("model.arch") in ("", "sdxl", "sd1", "sd15", "sd2")
            and not is_other_family
        )
        if has_clip:
            handle(draft, source_key)
        else:
            _refuse_if_enabled(pictures.NO_TEXT_ENCODER_NOTE)(draft, source_key)

    return handler


def _convert_base(draft: ConfigDraft, source_key: SourceKey) -> None:
    """Translates `model.quantize`. The dtype is the value of `model.qtype`, which is qfloat8 by
    default.
    """
    kind = str(draft.source_values.get("model.qtype") or "qfloat8").lower()
    dtype_name = None
    if "float8" in kind:
        dtype_name = "fp8"
    elif kind in ("qint8", "int8"):
        dtype_name = "int8"
    if dtype_name is None:
        draft.report_not_offered(
            source_key,
            f"{kind}: the base is bf16; precision.base: fp8 or int8, or precision.preset: nf4-lora",
        )
    else:
        draft.set(source_key, "precision.base", dtype_name, "with one scale per channel")


# reason -> the keys for which it holds, separated by spaces
_DATASET_NO_EFFECT = {
    ".txt beside the picture, or .caption": "caption_ext",
    pictures.CACHED_NOTE: "cache_latents cache_latents_to_disk cache_text_embeddings",
    pictures.BUCKETS_NOTE: "buckets bucket_tolerance",
    transforms.IRRELEVANT_NOTE: "trim_auto_frame_count_tail",
}
# what to use instead -> the keys of a data set that Isotype does not offer
_DATASET_NOT_OFFERED = {
    "images.flip mirrors left and right": "flip_y",
    "the loss counts what the mask shows": "mask_min_value",
    "weight, of images.regularisation": "network_weight",
    "images.frames: all clips of a source have the same number of frames": "auto_frame_count",
    clips.NO_PICTURE_NOTE: "do_i2v",
    "videos have no sound": "do_audio audio_*",
}
# key of a data set in the tool's configuration -> the function that translates it
_DATASET_KEYS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _DATASET_NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _DATASET_NOT_OFFERED),
    "folder_path": transforms.report_changed("images.train, or images.regularisation with is_reg"),
    "dataset_path": transforms.report_changed("images.train"),
    "default_caption": transforms.report_changed("caption of the source"),
    "caption_dropout_rate": transforms.convert_number("images.caption_dropout"),
    "shuffle_tokens": pictures.set_tag_orders,
    "resolution": _convert_resolution,
    "num_frames": _convert_frames,
    "shrink_video_to_frames": transforms.choose_handler(
        lambda _, source_key: transforms.is_enabled(source_key.value),
        transforms.report_changed(_SHRINK_NOTE),
        transforms.report_no_effect(f"as here: {clips.HEAD_NOTE}"),
    ),
    "fps": _convert_frame_rate,
    "is_reg": transforms.report_changed("images.regularisation"),
    "num_repeats": transforms.report_changed("repeats of the source"),
    "mask_path": transforms.convert_to("images.masks", str),
    "control_path": transforms.report_changed("controls of the source"),
    "control_path_1": transforms.report_changed("controls of the source"),
    "control_path_2": transforms.report_changed("controls of the source"),
    "control_path_3": transforms.report_changed("controls of the source"),
    "flip_x": transforms.set_if_enabled("images.flip", True),
    "trigger_word": transforms.convert_to("images.trigger", str),
    "random_crop": pictures.set_random_crops,
}
# reason -> the keys for which it holds, separated by spaces
_NO_EFFECT = {
    "run.folder names the folder": "training_folder",
    "model.device": "device",
    "the samples before step 1 are the base's, to compare with": "train.skip_first_sample sample.sample_start_step",
    "in run.samples": "sample.neg sample.seed sample.walk_seed",
    "samples are played at images.frame_rate": "sample.fps",
    "a run trains one denoiser of Wan 2.2": "train.switch_boundary_every",
    "precision.save: adapters are fp32": "save.dtype",
    pictures.NOT_UPLOADED_NOTE: "save.push_to_hub save.hf_*",
    transforms.IRRELEVANT_NOTE: (
        "type performance_log_every sqlite_db_path logging.* model.is_flux model.arch model.is_xl"
        " model.is_v2 model.is_v3 model.model_kwargs model.quantize_te model.qtype_te"
        " train.unload_text_encoder train.cache_text_embeddings train.train_unet"
        " train.noise_scheduler sample.sampler save.save_format"
    ),
}
# what to use instead -> the keys that Isotype does not offer, in one text
_NOT_OFFERED = {
    "precision.preset: nf4-lora": "model.low_vram model.layer_offloading*",
    "an assistant adapter is not offered: train on the model that is not distilled": (
        "model.assistant_lora_path"
    ),
    "convolutions have no adapter": "network.conv network.conv_alpha",
    "adapter.targets names modules": "network.network_kwargs",
    pictures.ADAM_SETTINGS_NOTE: "train.optimizer_params",
    "images.regularisation keeps what the model can": (
        "train.diff_output_preservation* train.bypass_guidance_embedding"
    ),
}
# the tool's distribution of noise levels -> Isotype's
_TIMESTEPS = {"sigmoid": "logit_normal", "linear": "uniform", "uniform": "uniform"}
_STYLE_NOTE = "diffusion.logit_mean above 0 draws more noise (content), below 0 less (style)"
# key of the tool's configuration -> the function that translates it
HANDLERS: dict[str, transforms.Handler] = {
    **transforms.handlers_by_reason(transforms.report_no_effect, _NO_EFFECT),
    **transforms.handlers_by_reason(transforms.report_not_offered, _NOT_OFFERED),
    **transforms.copy_values(
        model="name=model.name_or_path",
        diffusion="noise_offset=train.noise_offset",
        adapter=(
            "r=network.linear alpha=network.linear_alpha dropout=network.dropout"
            " factor=network.lokr_factor"
        ),
        train=(
            "steps=train.steps batch_size=train.batch_size"
            " accumulate=train.gradient_accumulation_steps accumulate=train.gradient_accumulation"
            " weight_decay=train.optimizer_params.weight_decay clip=train.max_grad_norm"
        ),
        run=(
            "adapters_every=save.save_every adapters_keep=save.max_step_saves_to_keep"
            " sample_every=sample.sample_every sample_steps=sample.sample_steps"
            " sample_guidance=sample.guidance_scale"
        ),
    ),
    pictures.DATASET_PREFIX: pictures.dataset_handler(_DATASET_KEYS),
    "trigger_word": transforms.convert_to(
        "images.trigger", str, "put before every caption; there it replaces [trigger] too"
    ),
    # model and adapter
    "model.model_kwargs.train_high_noise": _convert_expert,
    "model.model_kwargs.train_low_noise": _convert_expert,
    "model.quantize": transforms.require_key("model.quantize", "on", _convert_base, "switched off"),
    "model.qtype": transforms.report_changed("decides precision.base, where model.quantize is on"),
    "network.type": transforms.choose_handler(
        lambda _, source_key: str(source_key.value).lower() == "lokr",
        pictures.set_lokr,
        transforms.report_no_effect(pictures.PEFT_LORA_NOTE),
    ),
    # Source  ai-toolkit of 2026-08-21 (27a03a9): toolkit/config_modules.py has
    #         NetworkConfig.pretrained_lora_path and ModelConfig.vae_path
    "network.pretrained_lora_path": pictures.set_start,
    "model.vae_path": pictures.set_vae,
    "network.lokr_full_rank": transforms.set_if_enabled(
        "adapter.r", _FULL_RANK, note="a rank at which both factors are whole, with as much alpha"
    ),
    # steps
    "train.train_text_encoder": _require_clip(
        transforms.set_if_enabled("adapter.text_encoders", True)
    ),
    "train.text_encoder_lr": transforms.require_key(
        "train.train_text_encoder",
        "on",
        _require_clip(pictures.convert_text_encoder_rate),
        "without train_text_encoder",
    ),
    "train.gradient_checkpointing": transforms.convert_switch(
        "train.gradient_checkpointing", "layers", "none"
    ),
    "train.optimizer": transforms.convert_optimizer,
    "train.lr": pictures.convert_rate,
    "train.lr_scheduler": transforms.convert_schedule,
    "train.ema_config.use_ema": transforms.set_if_enabled("train.ema", 0.99),
    "train.ema_config.ema_decay": transforms.require_key(
        "train.ema_config.use_ema", "on", transforms.convert_number("train.ema"), "without use_ema"
    ),
    "train.dtype": pictures.note_precision_key,
    "train.timestep_type": transforms.convert_choice(
        "diffusion.timesteps", _TIMESTEPS, f"{pictures.TIMESTEPS_NOTE}, and diffusion.shift"
    ),
    "train.content_or_style": transforms.accept_only("balanced", "the default", _STYLE_NOTE),
    "train.loss_type": transforms.accept_only(
        "mse", "the squared error", "diffusion.loss: l2, huber"
    ),
    "train.min_denoising_steps": pictures.convert_timestep("diffusion.least_noise"),
    "train.max_denoising_steps": pictures.convert_timestep("diffusion.most_noise"),
    "train.linear_timesteps": transforms.set_if_enabled("diffusion.timesteps", "uniform"),
    "train.disable_sampling": transforms.set_if_enabled("run.sample_every", 0),
    # samples, saving
    **transforms.same_handler(_convert_sample_size, "sample.width sample.height"),
    "sample.num_frames": _convert_sample_frames,
    **transforms.same_handler(_convert_samples, "sample.prompts sample.samples"),
}
_DEFAULTS = {
    "train.batch_size": 1,
    "train.weight_decay": 0.01,
    "images.max_aspect": 2.0,
    "images.uncaptioned": "empty",
}


def add_defaults(draft: ConfigDraft, source: Source) -> None:
    """Adds ai-toolkit's defaults to the new configuration where they differ from the defaults of
    Isotype. Also adds the folders or data sets with the pictures.
    """
    if transforms.is_enabled(source.get("network.lokr_full_rank")):  # overrides `network.linear`
        draft.settings |= {"adapter.r": _FULL_RANK, "adapter.alpha": float(_FULL_RANK)}
    if draft.settings.get("adapter.kind") != "lokr":
        draft.settings.pop("adapter.factor", None)
    has_network = any(source_key.name.startswith("network.") for source_key in source.keys)
    draft.set_adapter_defaults("lora" if has_network else "none", 4)
    pictures.drop_text_encoders(draft)
    pictures.drop_new_adapter_settings(draft)
    pictures.set_default_preset(draft, source.get("train.dtype") or "bf16")
    draft.set_defaults(pictures.COMMON_DEFAULTS | _DEFAULTS)
    if draft.lowercase_value("model.arch") == "wan22_14b":
        draft.set_default("diffusion.expert", _trained_expert(draft))
    clips.set_sample_size(draft, *_sample_size(draft))
    if "run.adapters_every" not in draft.settings:
        draft.settings.pop("run.adapters_keep", None)
    sources_by_setting: dict[str, list[dict[str, Any]]] = {
        "images.train": [],
        "images.regularisation": [],
    }
    for entry in pictures.collect_datasets(draft):
        if folder := entry.get("folder_path") or entry.get("dataset_path"):
            if transforms.is_enabled(entry.get("is_reg")):
                setting = "images.regularisation"
            else:
                setting = "images.train"
            sizes = _resolutions(draft, entry["resolution"]) if entry.get("resolution") else ()
            paths = _list_paths(entry, "control_path")
            if paths:
                controls = {"controls": paths[0] if len(paths) == 1 else paths}
            else:
                controls = {}
            sources_by_setting[setting].append(
                pictures.picture_source(
                    folder,
                    repeats=entry.get("num_repeats"),
                    resolution=sizes,
                    frames=_frame_count(draft, entry.get("num_frames", 1)),
                )
                | controls
            )
    pictures.set_sources(draft, sources_by_setting)
