"""kohya's sd-scripts: command lines, TOML of a run, TOML of its datasets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import pictures as p
from . import transforms as t
from .source import Source
from .transforms import Draft, Given


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    module = str(source.get("network_module") or "")
    if (
        module
        and not re.search(r"(^|\.)lora", module)
        and _arguments(source.get("network_args")).get("algo") != "lokr"
    ):
        return (
            f"network_module: {module} is not offered: adapter.kind is lora, or lokr with algo=lokr"
            " in network_args"
        )
    for key, why in (
        ("controlnet_model_name_or_path", "ControlNet"),
        ("token_string", "textual inversion"),
    ):
        if source.get(key):
            return f"{key}: {why} is not offered"
    return None


def _arguments(given: Any) -> dict[str, str]:
    """`["algo=lokr", "factor=8"]`, or the same with spaces."""
    words = given if isinstance(given, list) else str(given or "").split()
    return dict(str(word).strip("\"'").split("=", 1) for word in words if "=" in str(word))


def _network_args(draft: Draft, given: Given) -> None:
    found = _arguments(given.value)
    taken = {
        "factor": "adapter.factor",
        "loraplus_lr_ratio": "adapter.plus",
        "loraplus_unet_lr_ratio": "adapter.plus",
    }
    if found.get("algo") == "lokr":
        p.lokr(draft, given)
    for name, value in found.items():
        if name in taken and not (
            name == "factor" and (found.get("algo") != "lokr" or int(value) < 1)
        ):
            draft.set(given, taken[name], t.as_number(value))
    if left := [name for name in found if name not in taken and name != "algo"]:
        draft.not_offered(
            given,
            f"{', '.join(left)}: every linear layer of the blocks is adapted; adapter.targets names"
            " others",
        )


def _samples(draft: Draft, given: Given) -> None:
    file = next(
        (
            found
            for found in (Path(str(given.value)), Path(draft.folder) / str(given.value))
            if found.is_file()
        ),
        None,
    )
    if file is None or file.suffix != ".txt":
        draft.not_offered(
            given, "the file is not there, or is no .txt: run.samples takes the prompts themselves"
        )
    else:
        draft.set(
            given,
            "run.samples",
            _sample_lines(file.read_text(encoding="utf-8")),
            "with their own settings",
        )


def _sample_lines(text: str) -> list[Any]:
    """Prompts, a line each: `a dog --n blurry --w 768 --h 768 --d 7 --s 30 --l 5`."""
    found: list[Any] = []
    for line in text.splitlines():
        words, *options = re.split(r"\s--(?=[a-z]+\s)", line.strip())
        if not words or words.startswith("#"):
            continue
        given = dict(option.split(" ", 1) for option in options if " " in option)
        made: dict[str, Any] = {"prompt": words.strip()}
        if "n" in given:
            made["negative"] = given["n"].strip()
        if sides := [int(given[side]) for side in ("w", "h") if side in given]:
            made["size"] = max(sides)
        for short, key, convert in (
            ("s", "steps", int),
            ("d", "seed", int),
            ("l", "guidance", float),
        ):
            if short in given:
                made[key] = convert(given[short])
        found.append(made if len(made) > 1 else made["prompt"])
    return found


def _keep_tokens(draft: Draft, given: Given) -> None:
    """Of the run, or of a subset beside its own shuffle_caption."""
    if t.is_on(
        draft.keys.get(
            "shuffle_caption", draft.keys.get(given.name.replace("keep_tokens", "shuffle_caption"))
        )
    ):
        draft.set(given, "images.keep_tags", int(given.value), "of all pictures of the run")
    else:
        draft.no_effect(given, "without shuffle_caption")


def _frozen_encoders(draft: Draft) -> bool:
    return any(
        t.is_on(draft.keys.get(key))
        for key in ("network_train_unet_only", "cache_text_encoder_outputs")
    )


def _text_encoder_lr(draft: Draft, given: Given) -> None:
    rates = given.value if isinstance(given.value, list) else [given.value]
    if _frozen_encoders(draft) or not any(map(float, rates)):
        draft.no_effect(given, "the text encoders stay frozen")
    elif draft.keys.get("clip_l") or draft.keys.get("t5xxl"):
        draft.not_offered(given, p.NO_TEXT_ENCODER)
    else:
        p.text_rate(draft, given)


_OF_PICTURES_NO_EFFECT = {
    p.BUCKETS: "min_bucket_reso max_bucket_reso bucket_reso_steps",
    t.IRRELEVANT: "caption_separator caption_extension",
}
_OF_PICTURES_NOT_OFFERED = {
    "images.crop: windows at random": "face_crop_aug_range",
    "images.trigger: a word before every caption": "caption_prefix caption_suffix",
    "a metadata.jsonl in the folder": "metadata_file in_json",
    "images.masks, where it holds masks": "conditioning_data_dir",
    t.NO_SETTING: (
        "bucket_no_upscale color_aug caption_dropout_every_n_epochs secondary_separator"
        " keep_tokens_separator"
    ),
}
_OF_PICTURES: dict[str, t.Handler] = {
    **t.table(t.no_effect, _OF_PICTURES_NO_EFFECT),
    **t.table(t.not_offered, _OF_PICTURES_NOT_OFFERED),
    "resolution": lambda draft, given: p.resolution(
        draft, replace(given, value=p.largest_side(given.value))
    ),
    "enable_bucket": t.to(
        "images.max_aspect", lambda value: 2.0 if t.is_on(value) else 1.0, "aspect buckets"
    ),
    "random_crop": p.WINDOWS,
    "shuffle_caption": p.TAG_ORDERS,
    "keep_tokens": _keep_tokens,
    "caption_tag_dropout_rate": t.when(
        lambda draft, _: "images.tag_orders" in draft.settings,
        t.to("images.tag_dropout", float, "of all pictures of the run"),
        t.not_offered("images.tag_dropout, with images.tag_orders"),
    ),
    **t.carried(images="flip=flip_aug caption_dropout=caption_dropout_rate"),
}
_SUBSET: dict[str, t.Handler] = {
    **_OF_PICTURES,
    "image_dir": t.changed("images.train, or images.regularisation with is_reg"),
    "num_repeats": t.changed("repeats of the source"),
    "class_tokens": t.changed("caption of the source, where pictures have none of their own"),
    "is_reg": t.changed("images.regularisation"),
    "batch_size": t.count("train.batch_size"),
}
_NO_EFFECT = {
    "its datasets are images.*": "dataset_config",
    "the text encoders stay frozen: adapter.text_encoders is false unless asked": (
        "network_train_unet_only"
    ),
    "checkpoints are always written: run.save_every": "save_state save_state_on_train_end resume",
    p.CACHED: (
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs"
        " cache_text_encoder_outputs_to_disk vae_batch_size skip_cache_check"
    ),
    t.GPUS: "num_processes num_cpu_threads_per_process ddp_*",
    p.NOT_UPLOADED: "huggingface_*",
    t.IRRELEVANT: (
        "clip_l clip_g t5xxl ae vae v2 tokenizer_cache_dir clip_skip"
        " network_module model_prediction_type sample_sampler output_name logging_dir log_*"
        " max_data_loader_n_workers persistent_data_loader_workers xformers sdpa mem_eff_attn"
        " lowvram highvram max_token_length metadata_* training_comment console_* config_file"
        " wandb_* torch_compile dynamo_* apply_t5_attn_mask prior_* split_mode no_metadata"
    ),
}
_NOT_OFFERED = {
    "adapter.start_from goes on with a PEFT folder": "network_weights",
    "train.clip bounds the gradient": "scale_weight_norms",
    "the base is bf16; precision.preset: nf4-lora takes a quarter": "blocks_to_swap",
    p.ADAM: "optimizer_args",
    "train.schedule has no powers and no restarts": (
        "lr_scheduler_num_cycles lr_scheduler_power lr_scheduler_args"
    ),
    "diffusion.noise_offset": (
        "noise_offset_type multires_noise_iterations multires_noise_discount adaptive_noise_scale"
    ),
    "c is constant: diffusion.huber_c": "huber_schedule",
    "images.masks names a folder of masks": "masked_loss",
    "run.sample_every counts steps": "sample_every_n_epochs",
    "run.adapters_every counts steps": "save_every_n_epochs",
    "run.adapters_keep counts adapters": "save_last_n_steps",
    t.NO_SETTING: (
        "network_train_text_encoder_only ip_noise_gamma ip_noise_gamma_random_strength"
        " weighting_scheme scale_v_pred_loss_like_noise_pred debiased_*"
    ),
}
_SAMPLINGS = {
    "sigmoid": "logit_normal",
    **dict.fromkeys(("shift", "flux_shift"), ("logit_normal", "the shift is diffusion.shift")),
    **dict.fromkeys(("uniform", "sigma"), "uniform"),
}
_HUBER = dict.fromkeys(("huber", "smooth_l1"), ("huber", "with a constant c"))
KEYS: dict[str, t.Handler] = {
    **p.SCRIPT,
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
        images="train=train_data_dir regularisation=reg_data_dir",
        diffusion="logit_std=sigmoid_scale shift=discrete_flow_shift",
        adapter="r=network_dim alpha=network_alpha dropout=network_dropout",
        train="epochs=max_train_epochs",
        run="adapters_every=save_every_n_steps sample_every=sample_every_n_steps",
    ),
    p.DATASET: p.dataset(_SUBSET),
    **_OF_PICTURES,
    # adapter
    "network_args": _network_args,
    **t.each(
        t.when_on("precision.base", "fp8", note="with a scale a channel; there without scales"),
        "fp8_base fp8_base_unet",
    ),
    **t.each(p.DECIDES, "mixed_precision full_bf16 full_fp16 save_precision no_half_vae"),
    # steps
    "unet_lr": p.rate,
    "text_encoder_lr": _text_encoder_lr,
    "optimizer_type": t.optimizer,
    # the objective
    "v_parameterization": t.when_on("diffusion.objective", "v"),
    "loss_type": t.word(
        "diffusion.loss", _HUBER, "the squared error, the default", fate="no_effect"
    ),
    "huber_c": t.where(
        "loss_type", "huber smooth_l1", t.number("diffusion.huber_c"), "without loss_type: huber"
    ),
    "timestep_sampling": t.word("diffusion.timesteps", _SAMPLINGS, p.DENSITIES),
    "min_timestep": p.of_1000("diffusion.least_noise"),
    "max_timestep": p.of_1000("diffusion.most_noise"),
    "prior_loss_weight": t.changed("weight: {} of images.regularisation"),
    # samples, saving
    "sample_prompts": _samples,
    "save_model_as": t.always(
        "run.adapter_format", "comfyui", "comfyui.safetensors beside PEFT's folder"
    ),
}


def finish(draft: Draft, source: Source) -> None:
    """kohya's defaults where they are not Isotype's, and the sources of pictures."""
    whole = not source.get("network_module") and not source.get("network_dim")
    if not draft.default_adapter("none" if whole else "lora", 4, 1.0):
        p.without_adapters_on_the_way(draft)
    told = _frozen_encoders(draft) or draft.keys.get("text_encoder_lr") is not None
    # it trains them unless told otherwise
    if re.search(r"(^|/)(sdxl_)?train_network\b", source.method) and not told:
        draft.default("adapter.text_encoders", True)
    p.without_text_encoders(draft)
    p.preset_of(draft, source.get("mixed_precision"), full=t.is_on(source.get("full_bf16")))
    draft.default_all(
        p.NONE | {"train.batch_size": 1, "train.weight_decay": 0.01, "images.resolution": 512}
    )
    if "train.epochs" not in draft.settings:
        draft.default("train.steps", 1600)
    weight = source.get("prior_loss_weight") or 1.0
    sides: dict[str, list[dict[str, Any]]] = {"images.train": [], "images.regularisation": []}
    for entry in p.datasets_of(draft):
        if "image_dir" in entry:
            prior = t.is_on(entry.get("is_reg"))
            settings: dict[str, Any] = {
                "caption": entry.get("class_tokens"),
                "repeats": entry.get("num_repeats"),
            }
            settings |= {
                "weight": weight if prior else 1.0,
                "resolution": (
                    [p.largest_side(entry["resolution"])] if entry.get("resolution") else ()
                ),
            }
            sides["images.regularisation" if prior else "images.train"].append(
                p.source(entry["image_dir"], **settings)
            )
    p.put_sources(draft, sides)
    for side, own in (("images.train", 1.0), ("images.regularisation", weight)):
        if isinstance(folder := draft.settings.get(side), str):
            p.put_sources(draft, {side: p.numbered_folders(folder, Path(draft.folder), weight=own)})
