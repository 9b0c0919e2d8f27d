"""ai-toolkit: the YAML of a job, its first process."""

from __future__ import annotations

from typing import Any

from .draft import Draft, Given
from .picture_tools import DATASET, datasets_of, is_on, preset_of, put_sources, rate, side_of_square
from .source import Source
from .transforms import (
    IRRELEVANT,
    SCHEDULES,
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
    to_either,
    to_number,
    when_on,
)

OWN_PRECISION = True


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    kind, network = str(source.get("type") or "sd_trainer"), str(source.get("network.type") or "lora").lower()
    if kind not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        return f"config.process[0].type: {kind} is not offered: sd_trainer is"
    if network != "lora":
        return f"network.type: {network} is not offered: adapter.kind is lora"
    if any(given.name.startswith(f"{DATASET}.") and given.name.endswith(".control_path") and given.value for given in source.keys):
        return "datasets: control_path: pairs of pictures are not offered"
    return None


def _dataset(draft: Draft, given: Given) -> None:
    key = given.name.split(".", 2)[2]
    if handler := _PICTURES.get(key):
        handler(draft, given)
    elif not given.value:
        draft.no_effect(given, "switched off")
    else:
        draft.not_offered(given, "isotype import does not know this key of a dataset")


def _into(what: str) -> Handler:
    return lambda draft, given: draft.changed(given, what)


def _shuffled(draft: Draft, given: Given) -> None:
    when_on("images.tag_orders", 8, note="so many random orders of a caption's tags are encoded")(draft, given)


_PICTURES: dict[str, Handler] = {
    "folder_path": _into("images.train, or images.regularisation with is_reg"),
    "dataset_path": _into("images.train"),
    "caption_ext": no_effect(".txt beside the picture, or .caption"),
    "default_caption": _into("caption of the source"),
    "caption_dropout_rate": to_number("images.caption_dropout"),
    "shuffle_tokens": _shuffled,
    "resolution": to("images.resolution", side_of_square, "the largest: a run has one resolution"),
    "is_reg": _into("images.regularisation"),
    "num_repeats": _into("repeats of the source"),
    "mask_path": to("images.masks", str),
    "flip_x": when_on("images.flip", True),
    "flip_y": not_offered("images.flip mirrors left and right"),
    "trigger_word": to("images.trigger", str),
    "random_crop": when_on("images.crop", 4, note="so many windows of each picture are kept; one is drawn each time"),
    **each(
        no_effect("latents are always computed once and kept: images.cache"), "cache_latents cache_latents_to_disk cache_text_embeddings"
    ),
    **each(not_offered("the loss counts what the mask shows"), "mask_min_value"),
    "network_weight": not_offered("weight, of images.regularisation"),
    **each(no_effect("buckets follow images.resolution and images.max_aspect"), "buckets bucket_tolerance"),
}


def _samples(draft: Draft, given: Given) -> None:
    entries = given.value if isinstance(given.value, list) else [given.value]
    trigger = str(draft.keys.get("trigger_word") or "")
    seed, walk = draft.keys.get("sample.seed"), is_on(draft.keys.get("sample.walk_seed"))
    found: list[Any] = []
    for i, entry in enumerate(entries):
        text = str(entry.get("prompt", "") if isinstance(entry, dict) else entry).replace("[trigger]", trigger)
        made: dict[str, Any] = {"prompt": text}
        if negative := draft.keys.get("sample.neg"):
            made["negative"] = str(negative)
        if seed is not None:
            made["seed"] = int(seed) + (i if walk else 0)
        found.append(made if len(made) > 1 else text)
    draft.set(given, "run.samples", found, "with their seeds")


def _size(draft: Draft, given: Given) -> None:
    draft.set(given, "run.sample_size", max(int(draft.keys.get(f"sample.{side}") or 0) for side in ("width", "height")), "a square")


def _density(draft: Draft, given: Given) -> None:
    word = str(given.value).lower()
    if word == "sigmoid":
        draft.set(given, "diffusion.timesteps", "logit_normal")
    elif word in ("linear", "uniform"):
        draft.set(given, "diffusion.timesteps", "uniform")
    else:
        draft.not_offered(given, "diffusion.timesteps: logit_normal, uniform, mode, and diffusion.shift")


def _trained(draft: Draft, given: Given) -> None:
    draft.not_offered(given, "text encoders are not trained") if is_on(given.value) else draft.no_effect(given, "switched off")


KEYS: dict[str, Handler] = {
    DATASET: _dataset,
    "type": no_effect("a trainer of LoRAs"),
    "training_folder": no_effect("run.folder names the folder"),
    "device": no_effect("model.device"),
    "trigger_word": to("images.trigger", str, "put before every caption; there it replaces [trigger] too"),
    **each(no_effect(IRRELEVANT), "performance_log_every sqlite_db_path logging.*"),
    # model
    "model.name_or_path": to("model.name", str),
    **each(
        no_effect("the pipeline's own file says what it is"),
        "model.is_flux model.arch model.is_xl model.is_v2 model.is_v3 model.model_kwargs",
    ),
    "model.quantize": lambda draft, given: (
        draft.not_offered(given, "the base is bf16; precision.preset: nf4-lora takes a quarter")
        if is_on(given.value)
        else draft.no_effect(given, "switched off")
    ),
    **each(no_effect("text is encoded once, and the encoders are freed"), "model.quantize_te model.qtype_te"),
    **each(not_offered("precision.preset: nf4-lora"), "model.qtype model.low_vram model.layer_offloading*"),
    "model.assistant_lora_path": not_offered("an assistant adapter is not offered: train on the model that is not distilled"),
    # adapter
    "network.type": no_effect("PEFT's LoRA"),
    "network.linear": to_count("adapter.r"),
    "network.linear_alpha": to_number("adapter.alpha"),
    "network.dropout": to_number("adapter.dropout"),
    **each(not_offered("convolutions have no adapter"), "network.conv network.conv_alpha"),
    "network.network_kwargs": not_offered("adapter.targets names modules"),
    # steps
    "train.batch_size": to_count("train.batch_size"),
    "train.steps": to_count("train.steps"),
    **each(to_count("train.accumulate"), "train.gradient_accumulation_steps train.gradient_accumulation"),
    "train.train_unet": no_effect("the denoiser is what trains"),
    "train.train_text_encoder": _trained,
    "train.gradient_checkpointing": to_either("train.gradient_checkpointing", "layers", "none"),
    "train.noise_scheduler": no_effect("the pipeline's own scheduler"),
    "train.optimizer": optimizer,
    "train.optimizer_params.weight_decay": to_number("train.weight_decay"),
    "train.optimizer_params": not_offered("train.beta1, train.beta2, train.epsilon, train.weight_decay"),
    "train.lr": rate("train.optimizer"),
    "train.lr_scheduler": schedule_of(SCHEDULES),
    "train.max_grad_norm": to_number("train.clip"),
    "train.skip_first_sample": no_effect("the samples before step 1 are the base's, to compare with"),
    "train.ema_config.use_ema": when_on("train.ema", 0.99),
    "train.ema_config.ema_decay": lambda draft, given: (
        draft.set(given, "train.ema", float(given.value))
        if is_on(draft.keys.get("train.ema_config.use_ema"))
        else draft.no_effect(given, "without use_ema")
    ),
    "train.dtype": changed("one of the keys that decide precision.preset"),
    "train.timestep_type": _density,
    "train.content_or_style": lambda draft, given: (
        draft.no_effect(given, "the default")
        if str(given.value) == "balanced"
        else draft.not_offered(given, "diffusion.logit_mean above 0 draws more noise (content), below 0 less (style)")
    ),
    "train.noise_offset": to_number("diffusion.noise_offset"),
    "train.loss_type": lambda draft, given: (
        draft.no_effect(given, "the squared error") if given.value == "mse" else draft.not_offered(given, "diffusion.loss: l2, huber")
    ),
    "train.min_denoising_steps": lambda draft, given: draft.set(given, "diffusion.least_noise", number(given.value) / 1000, "of 1000"),
    "train.max_denoising_steps": lambda draft, given: draft.set(given, "diffusion.most_noise", number(given.value) / 1000, "of 1000"),
    "train.linear_timesteps": when_on("diffusion.timesteps", "uniform"),
    "train.disable_sampling": when_on("run.sample_every", 0),
    **each(no_effect("text is encoded once, and the encoders are freed"), "train.unload_text_encoder train.cache_text_embeddings"),
    **each(
        not_offered("images.regularisation keeps what the model can"), "train.diff_output_preservation* train.bypass_guidance_embedding"
    ),
    # samples, saving
    "sample.sampler": no_effect("the pipeline's own scheduler"),
    "sample.sample_every": to_count("run.sample_every"),
    **each(_size, "sample.width sample.height"),
    "sample.prompts": _samples,
    "sample.samples": _samples,
    **each(no_effect("in run.samples"), "sample.neg sample.seed sample.walk_seed"),
    "sample.guidance_scale": to_number("run.sample_guidance"),
    "sample.sample_steps": to_count("run.sample_steps"),
    **each(no_effect("one picture a prompt"), "sample.num_frames sample.fps"),
    "save.dtype": no_effect("precision.save: adapters are fp32"),
    "save.save_every": to_count("run.adapters_every"),
    "save.max_step_saves_to_keep": to_count("run.adapters_keep"),
    "save.save_format": no_effect("safetensors"),
    "save.push_to_hub": no_effect("nothing is uploaded"),
    "save.hf_*": no_effect("nothing is uploaded"),
}


def finish(draft: Draft, source: Source) -> None:
    """ai-toolkit's defaults where they are not Isotype's, and the sources of pictures."""
    lora = any(given.name.startswith("network.") for given in source.keys)
    draft.default("adapter.kind", "lora" if lora else "none")
    if not draft.without_adapter():
        draft.default("adapter.r", 4)
        draft.default("adapter.alpha", float(draft.settings["adapter.r"]))
    preset_of(draft, source.get("train.dtype") or "bf16")
    draft.default("train.schedule", "constant")
    draft.default("train.warmup", 0)
    draft.default("train.batch_size", 1)
    draft.default("train.weight_decay", 0.01)
    draft.default("images.max_aspect", 2.0)
    draft.default("images.eval_split", 0.0)
    draft.default("images.uncaptioned", "empty")
    if "run.adapters_keep" in draft.settings and "run.adapters_every" not in draft.settings:
        draft.settings.pop("run.adapters_keep")
    sides: dict[str, list[dict[str, Any]]] = {"images.train": [], "images.regularisation": []}
    for entry in datasets_of(draft):
        folder = entry.get("folder_path") or entry.get("dataset_path")
        if not folder:
            continue
        made: dict[str, Any] = {"name": str(folder)}
        if int(entry.get("num_repeats") or 1) > 1:
            made["repeats"] = int(entry["num_repeats"])
        sides["images.regularisation" if is_on(entry.get("is_reg")) else "images.train"].append(made)
    for side, sources in sides.items():
        put_sources(draft, side, sources)
