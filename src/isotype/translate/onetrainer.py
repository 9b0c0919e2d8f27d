"""OneTrainer: the JSON of a training, with its concepts inside or in the file that it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import pictures as p
from . import transforms as t
from .source import Source
from .transforms import Draft, Given

_METHODS = {"LORA": "lora", "FINE_TUNE": "none"}


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    method = str(source.get("training_method") or "LORA")
    peft = str(source.get("peft_type") or "LORA")
    if method not in _METHODS:
        return f"training_method: {method} is not offered: {' and '.join(_METHODS)} are"
    if method == "LORA" and peft not in ("LORA", "LOKR"):
        return f"peft_type: {peft} is not offered: adapter.kind is lora or lokr"
    return None


_CONCEPT_NO_EFFECT = {
    t.IRRELEVANT: (
        "name seed type enabled balancing_strategy tag_delimiter include_subdirectories"
        " image_variations text_variations"
    ),
}
_CONCEPT: dict[str, t.Handler] = {
    **t.table(t.no_effect, _CONCEPT_NO_EFFECT),
    "path": t.changed("images.train, or images.regularisation"),
    "balancing": t.changed("repeats of the source"),
    "loss_weight": t.changed("weight, of images.regularisation"),
    "prompt_source": t.word(
        "images.captions",
        {"filename": "names"},
        "a .txt beside the picture, or caption of the source",
        fate="changed",
    ),
    "prompt_path": t.changed("caption of the source, where a file has it"),
    "enable_tag_shuffling": p.TAG_ORDERS,
    "keep_tags_count": lambda draft, given: (
        t.number("images.keep_tags")(draft, given)
        if "images.tag_orders" in draft.settings
        else draft.no_effect(given, "off")
    ),
    "enable_random_flip": t.when_on("images.flip", True),
    "enable_crop_jitter": p.WINDOWS,
}


def _samples(draft: Draft, given: Given) -> None:
    found = []
    for entry in given.value if isinstance(given.value, list) else []:
        if not t.is_on(entry.get("enabled", True)):
            continue
        size = max(int(entry.get("width", 0)), int(entry.get("height", 0)))
        made: dict[str, Any] = {"prompt": str(entry.get("prompt", "")), "size": size}
        names = (("seed", "seed"), ("diffusion_steps", "steps"), ("cfg_scale", "guidance"))
        made |= {ours: entry[theirs] for theirs, ours in names if theirs in entry}
        if entry.get("negative_prompt"):
            made["negative"] = str(entry["negative_prompt"])
        found.append({key: value for key, value in made.items() if value != 0 or key == "seed"})
    draft.set(given, "run.samples", found, "with their own settings")


# encoders
_CLIP = {
    "stable_diffusion_15": 1,
    "stable_diffusion_20": 1,
    "stable_diffusion_21": 1,
    "stable_diffusion_xl_10_base": 2,
}


def _text_encoder(draft: Draft, given: Given) -> None:
    """`text_encoder.train`, `text_encoder_2.learning_rate` and the like: trained where all encoders
    of the family are.
    """
    parts = ("text_encoder", "text_encoder_2")[: _CLIP.get(draft.said("model_type"), 0)]
    part, _, key = given.name.partition(".")
    if not t.is_on(draft.keys.get(f"{part}.train")) or given.value is None:
        draft.no_effect(given, "not trained" if given.value is not None else "learning_rate")
    elif part not in parts or {draft.said("training_method"), draft.said("peft_type")} - {
        "",
        "lora",
    }:
        draft.not_offered(given, p.NO_TEXT_ENCODER)
    elif not all(t.is_on(draft.keys.get(f"{one}.train")) for one in parts):
        draft.not_offered(given, "adapter.text_encoders trains both")
    elif key == "train":
        draft.set(given, "adapter.text_encoders", True)
    else:
        rates = [
            draft.keys.get(f"{one}.learning_rate") or draft.keys.get("learning_rate")
            for one in parts
        ]
        p.text_rate(draft, replace(given, value=rates))


def _every(target: str, unit: str) -> t.Handler:
    """`sample_after` 10 with `sample_after_unit` STEP."""

    def handler(draft: Draft, given: Given) -> None:
        if str(draft.keys.get(unit)) in ("STEP", "steps"):
            t.count(target)(draft, given)
        elif str(draft.keys.get(unit)) in ("NEVER", "None"):
            draft.no_effect(given, "never")
        else:
            draft.not_offered(given, f"{target} counts steps")

    return handler


_CHECKPOINTING = {"OFF": "none", "CPU_OFFLOADED": "layers+offload"}
_WITHOUT = "without LOGIT_NORMAL"
_NO_EFFECT = {
    "its concepts are images.*": "concept_file_name",
    "part of train.ema": "ema_decay ema_update_step_interval",
    "run.folder names the folder": "output_model_destination",
    p.NO_TEXT_ENCODER: "text_encoder* unet* prior* transformer* vae* decoder* effnet*",
    "kept: images.cache": "latent_caching cache_dir clear_cache_before_training only_cache",
    t.IRRELEVANT: (
        "model_type lora_weight_dtype optimizer mse_strength loss_scaler sample_after_unit"
        " save_every_unit learning_rate_scaler __version model_name debug* tensorboard* validation*"
        " continue_last_backup backup* rolling_backup* train_device temp_device dataloader_threads"
        " compile enable_async_offloading layer_offload* custom_learning_rate_scheduler"
        " scheduler_params frames save_* sample_definition_file_name samples_to_tensorboard"
        " non_ema_sampling sample_* secrets cloud include_train_config force_*"
        " rescale_noise_scheduler_to_zero_terminal_snr align_prop* learning_rate_cycles"
        " learning_rate_min_factor quantization* multi_gpu* device_indexes gradient_reduce*"
        " fused_gradient_reduce async_gradient* attention_mechanism"
    ),
}
_NOT_OFFERED = {
    "images.masks names a folder of masks": "masked_training",
    "adapter.targets names modules": "layer_filter layer_filter_preset",
    "adapter.start_from goes on with a PEFT folder": "lora_model_name",
    "diffusion.loss: l2, huber": "mae_strength log_cosh_strength vb_loss_strength huber_strength",
    "diffusion.weighting: min_snr": "loss_weight_fn loss_weight_strength",
    p.NO_TEXT_ENCODER: "embedding* additional_embeddings",
    t.NO_SETTING: (
        "unmasked_probability unmasked_weight normalize_masked_area_loss lora_decompose_output_axis"
        " lora_decompose_norm_epsilon perturbation_noise_weight generalized_offset_noise"
    ),
}
KEYS: dict[str, t.Handler] = {
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
        model="name=base_model_name",
        diffusion=(
            "least_noise=min_noising_strength most_noise=max_noising_strength"
            " noise_offset=offset_noise_weight shift=timestep_shift"
        ),
        adapter="r=lora_rank alpha=lora_alpha dropout=dropout_probability",
        train=(
            "epochs batch_size accumulate=gradient_accumulation_steps"
            " warmup=learning_rate_warmup_steps weight_decay=optimizer.weight_decay"
            " beta1=optimizer.beta1 beta2=optimizer.beta2 epsilon=optimizer.eps clip=clip_grad_norm"
            " seed"
        ),
        run="folder=workspace_dir",
    ),
    p.DATASET: p.dataset(_CONCEPT, "concept"),
    "training_method": t.to("adapter.kind", _METHODS.get),
    "resolution": p.resolution,
    "aspect_ratio_bucketing": t.when_on("images.max_aspect", 2.0, note="aspect buckets"),
    # adapter
    "peft_type": lambda draft, given: (
        p.lokr if str(given.value) == "LOKR" else t.no_effect(p.PEFT)
    )(draft, given),
    **t.each(
        _text_encoder,
        "text_encoder.train text_encoder.learning_rate text_encoder_2.train"
        " text_encoder_2.learning_rate",
    ),
    "lora_decompose": t.when_on("adapter.dora", True),
    # precision
    **t.each(
        t.changed("decides precision.preset"),
        "train_dtype fallback_train_dtype weight_dtype output_dtype enable_autocast_cache",
    ),
    # steps
    "learning_rate": p.rate,
    "learning_rate_scheduler": p.SCRIPT["lr_scheduler"],
    "gradient_checkpointing": t.to(
        "train.gradient_checkpointing", lambda value: _CHECKPOINTING.get(str(value), "layers")
    ),
    "optimizer.optimizer": t.optimizer,
    "ema": t.when(
        lambda _, given: given.value == "OFF",
        t.no_effect("off"),
        lambda draft, given: draft.set(
            given, "train.ema", float(draft.keys.get("ema_decay") or 0.999)
        ),
    ),
    # the objective
    "timestep_distribution": t.word(
        "diffusion.timesteps", {"logit_normal": "logit_normal", "uniform": "uniform"}, p.DENSITIES
    ),
    "noising_weight": t.where(
        "timestep_distribution", "logit_normal", t.number("diffusion.logit_std"), _WITHOUT
    ),
    "noising_bias": t.where(
        "timestep_distribution", "logit_normal", t.number("diffusion.logit_mean"), _WITHOUT
    ),
    "dynamic_timestep_shifting": t.when_on(
        "diffusion.shift", "auto", note="the scheduler's own, by resolution"
    ),
    # samples, saving
    "samples": _samples,
    "sample_after": _every("run.sample_every", "sample_after_unit"),
    "save_every": _every("run.adapters_every", "save_every_unit"),
    "output_model_format": t.always("run.adapter_format", "comfyui", "one more file"),
}


def finish(draft: Draft, source: Source) -> None:
    """OneTrainer's defaults where they are not Isotype's, and the sources of pictures."""
    if not draft.default_adapter("lora", 16, 1.0):
        p.without_adapters_on_the_way(draft)
    p.preset_of(
        draft,
        source.get("train_dtype") or "bf16",
        full=str(source.get("weight_dtype")) == "BFLOAT_16",
    )
    draft.default_all(p.NONE | {"train.warmup": 200})
    sides: dict[str, list[dict[str, Any]]] = {"images.train": [], "images.regularisation": []}
    for entry in p.datasets_of(draft):
        if entry.get("path") and t.is_on(entry.get("enabled", True)):
            if str(entry.get("type")) == "PRIOR_PREDICTION":
                side = "images.regularisation"
            else:
                side = "images.train"
            sizes = p.several(source.get("resolution")) if source.get("resolution") else ()
            sides[side].append(
                p.source(entry["path"], repeats=entry.get("balancing"), resolution=sizes)
            )
    p.put_sources(draft, sides)
