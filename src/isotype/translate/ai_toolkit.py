"""ai-toolkit: the YAML of a job, its first process."""

from __future__ import annotations

from typing import Any

from . import pictures as p
from . import transforms as t
from .source import Source
from .transforms import Draft, Given


def refusal(source: Source) -> str | None:
    """Why this source's method is not offered, or None."""
    kind = str(source.get("type") or "sd_trainer")
    network = str(source.get("network.type") or "lora").lower()
    if kind not in ("sd_trainer", "ui_trainer", "diffusion_trainer"):
        return f"config.process[0].type: {kind} is not offered: sd_trainer is"
    if network not in ("lora", "lokr"):
        return f"network.type: {network} is not offered: adapter.kind is lora or lokr"
    if any(
        given.name.startswith(f"{p.DATASET}.")
        and given.name.endswith(".control_path")
        and isinstance(given.value, list)
        for given in source.keys
    ):
        return "datasets: control_path: several pictures before an edit are not offered: one is"
    return None


def _samples(draft: Draft, given: Given) -> None:
    entries = given.value if isinstance(given.value, list) else [given.value]
    trigger = str(draft.keys.get("trigger_word") or "")
    seed = draft.keys.get("sample.seed")
    walk = t.is_on(draft.keys.get("sample.walk_seed"))
    found: list[Any] = []
    for i, entry in enumerate(entries):
        text = str(entry.get("prompt", "") if isinstance(entry, dict) else entry).replace(
            "[trigger]", trigger
        )
        made: dict[str, Any] = {"prompt": text}
        if isinstance(entry, dict) and (control := entry.get("ctrl_img")):
            made["control"] = str(control)
        if negative := draft.keys.get("sample.neg"):
            made["negative"] = str(negative)
        if seed is not None:
            made["seed"] = int(seed) + (i if walk else 0)
        found.append(made if len(made) > 1 else text)
    draft.set(given, "run.samples", found, "with their seeds")


def _size(draft: Draft, given: Given) -> None:
    draft.set(
        given,
        "run.sample_size",
        max(int(draft.keys.get(f"sample.{side}") or 0) for side in ("width", "height")),
        "a square",
    )


_WHOLE = 100_000


def _refused_when_on(use: str) -> t.Handler:
    """Such a key may have another word than those of `OFF`."""
    return lambda draft, given: (
        draft.not_offered(given, use)
        if t.is_on(given.value)
        else draft.no_effect(given, "switched off")
    )


_OTHERS = (
    "model.is_flux",
    "model.is_v3",
    "model.is_auraflow",
    "model.is_pixart",
    "model.is_lumina2",
)


def _of_clip(then: t.Handler) -> t.Handler:
    """`then` for SDXL and Stable Diffusion, the family of a file that names none."""

    def handler(draft: Draft, given: Given) -> None:
        others = any(t.is_on(draft.keys.get(key)) for key in _OTHERS)
        known = draft.said("model.arch") in ("", "sdxl", "sd1", "sd15", "sd2") and not others
        (then if known else _refused_when_on(p.NO_TEXT_ENCODER))(draft, given)

    return handler


def _base(draft: Draft, given: Given) -> None:
    """Of `qtype`, qfloat8 by default."""
    kind = str(draft.keys.get("model.qtype") or "qfloat8").lower()
    word = "fp8" if "float8" in kind else "int8" if kind in ("qint8", "int8") else None
    if word is None:
        draft.not_offered(
            given,
            f"{kind}: the base is bf16; precision.base: fp8 or int8, or precision.preset: nf4-lora",
        )
    else:
        draft.set(given, "precision.base", word, "with a scale a channel")


_OF_PICTURES_NO_EFFECT = {
    ".txt beside the picture, or .caption": "caption_ext",
    p.CACHED: "cache_latents cache_latents_to_disk cache_text_embeddings",
    p.BUCKETS: "buckets bucket_tolerance",
}
_OF_PICTURES_NOT_OFFERED = {
    "images.flip mirrors left and right": "flip_y",
    "the loss counts what the mask shows": "mask_min_value",
    "weight, of images.regularisation": "network_weight",
}
_OF_PICTURES: dict[str, t.Handler] = {
    **t.table(t.no_effect, _OF_PICTURES_NO_EFFECT),
    **t.table(t.not_offered, _OF_PICTURES_NOT_OFFERED),
    "folder_path": t.changed("images.train, or images.regularisation with is_reg"),
    "dataset_path": t.changed("images.train"),
    "default_caption": t.changed("caption of the source"),
    "caption_dropout_rate": t.number("images.caption_dropout"),
    "shuffle_tokens": p.TAG_ORDERS,
    "resolution": p.resolution,
    "is_reg": t.changed("images.regularisation"),
    "num_repeats": t.changed("repeats of the source"),
    "mask_path": t.to("images.masks", str),
    "control_path": t.changed("controls of the source"),
    "flip_x": t.when_on("images.flip", True),
    "trigger_word": t.to("images.trigger", str),
    "random_crop": p.WINDOWS,
}
_NO_EFFECT = {
    "run.folder names the folder": "training_folder",
    "model.device": "device",
    "the samples before step 1 are the base's, to compare with": "train.skip_first_sample",
    "in run.samples": "sample.neg sample.seed sample.walk_seed",
    "precision.save: adapters are fp32": "save.dtype",
    p.NOT_UPLOADED: "save.push_to_hub save.hf_*",
    t.IRRELEVANT: (
        "type performance_log_every sqlite_db_path logging.* model.is_flux model.arch model.is_xl"
        " model.is_v2 model.is_v3 model.model_kwargs model.quantize_te model.qtype_te"
        " train.unload_text_encoder train.cache_text_embeddings train.train_unet"
        " train.noise_scheduler sample.sampler sample.num_frames sample.fps save.save_format"
    ),
}
_NOT_OFFERED = {
    "precision.preset: nf4-lora": "model.low_vram model.layer_offloading*",
    "an assistant adapter is not offered: train on the model that is not distilled": (
        "model.assistant_lora_path"
    ),
    "convolutions have no adapter": "network.conv network.conv_alpha",
    "adapter.targets names modules": "network.network_kwargs",
    p.ADAM: "train.optimizer_params",
    "images.regularisation keeps what the model can": (
        "train.diff_output_preservation* train.bypass_guidance_embedding"
    ),
}
_DENSITIES = {"sigmoid": "logit_normal", "linear": "uniform", "uniform": "uniform"}
_STYLE = "diffusion.logit_mean above 0 draws more noise (content), below 0 less (style)"
KEYS: dict[str, t.Handler] = {
    **t.table(t.no_effect, _NO_EFFECT),
    **t.table(t.not_offered, _NOT_OFFERED),
    **t.carried(
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
    p.DATASET: p.dataset(_OF_PICTURES),
    "trigger_word": t.to(
        "images.trigger", str, "put before every caption; there it replaces [trigger] too"
    ),
    # model and adapter
    "model.quantize": t.where("model.quantize", "on", _base, "switched off"),
    "model.qtype": t.changed("decides precision.base, where model.quantize is on"),
    "network.type": lambda draft, given: (
        p.lokr if str(given.value).lower() == "lokr" else t.no_effect(p.PEFT)
    )(draft, given),
    "network.lokr_full_rank": t.when_on(
        "adapter.r", _WHOLE, note="a rank at which both factors are whole, with as much alpha"
    ),
    # steps
    "train.train_text_encoder": _of_clip(t.when_on("adapter.text_encoders", True)),
    "train.text_encoder_lr": t.where(
        "train.train_text_encoder", "on", _of_clip(p.text_rate), "without train_text_encoder"
    ),
    "train.gradient_checkpointing": t.either("train.gradient_checkpointing", "layers", "none"),
    "train.optimizer": t.optimizer,
    "train.lr": p.rate,
    "train.lr_scheduler": t.schedule,
    "train.ema_config.use_ema": t.when_on("train.ema", 0.99),
    "train.ema_config.ema_decay": t.where(
        "train.ema_config.use_ema", "on", t.number("train.ema"), "without use_ema"
    ),
    "train.dtype": p.DECIDES,
    "train.timestep_type": t.word(
        "diffusion.timesteps", _DENSITIES, f"{p.DENSITIES}, and diffusion.shift"
    ),
    "train.content_or_style": t.only("balanced", "the default", _STYLE),
    "train.loss_type": t.only("mse", "the squared error", "diffusion.loss: l2, huber"),
    "train.min_denoising_steps": p.of_1000("diffusion.least_noise"),
    "train.max_denoising_steps": p.of_1000("diffusion.most_noise"),
    "train.linear_timesteps": t.when_on("diffusion.timesteps", "uniform"),
    "train.disable_sampling": t.when_on("run.sample_every", 0),
    # samples, saving
    **t.each(_size, "sample.width sample.height"),
    **t.each(_samples, "sample.prompts sample.samples"),
}
_DEFAULTS = {
    "train.batch_size": 1,
    "train.weight_decay": 0.01,
    "images.max_aspect": 2.0,
    "images.uncaptioned": "empty",
}


def finish(draft: Draft, source: Source) -> None:
    """ai-toolkit's defaults where they are not Isotype's, and the sources of pictures."""
    if t.is_on(source.get("network.lokr_full_rank")):  # whatever `linear` says beside it
        draft.settings |= {"adapter.r": _WHOLE, "adapter.alpha": float(_WHOLE)}
    if draft.settings.get("adapter.kind") != "lokr":
        draft.settings.pop("adapter.factor", None)
    draft.default_adapter(
        "lora" if any(given.name.startswith("network.") for given in source.keys) else "none", 4
    )
    p.without_text_encoders(draft)
    p.preset_of(draft, source.get("train.dtype") or "bf16")
    draft.default_all(p.NONE | _DEFAULTS)
    if "run.adapters_every" not in draft.settings:
        draft.settings.pop("run.adapters_keep", None)
    sides: dict[str, list[dict[str, Any]]] = {"images.train": [], "images.regularisation": []}
    for entry in p.datasets_of(draft):
        if folder := entry.get("folder_path") or entry.get("dataset_path"):
            if t.is_on(entry.get("is_reg")):
                side = "images.regularisation"
            else:
                side = "images.train"
            sizes = p.several(entry["resolution"]) if entry.get("resolution") else ()
            if entry.get("control_path"):
                controls = {"controls": str(entry["control_path"])}
            else:
                controls = {}
            sides[side].append(
                p.source(folder, repeats=entry.get("num_repeats"), resolution=sizes) | controls
            )
    p.put_sources(draft, sides)
