"""What the tables of the tools that train on pictures share: datasets and their sources, rates, the arguments that scripts inherited."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import transforms as t
from .picture_files import DATASET
from .transforms import Draft, Given

NONE = {"train.schedule": "constant", "train.warmup": 0, "images.eval_split": 0.0}  # defaults of most: no schedule, nothing held out
PEFT = "PEFT's LoRA"
NOT_UPLOADED = "nothing is uploaded"
CACHED = "latents and text are always computed once and kept: images.cache"
BUCKETS = "buckets follow images.resolution and images.max_aspect"
NO_TEXT_ENCODER = "adapter.text_encoders trains those of SDXL and Stable Diffusion only, with a LoRA"
DECIDES = t.changed("one of the keys that decide precision.preset")
ADAM = "train.beta1, train.beta2, train.epsilon, train.weight_decay"
DENSITIES = "diffusion.timesteps: logit_normal, uniform, mode"
MANY_WINDOWS = "so many windows of each picture are kept; one is drawn each time"
WINDOWS = t.when_on("images.crop", 4, note=MANY_WINDOWS)
TAG_ORDERS = t.when_on("images.tag_orders", 8, note="so many random orders of a caption's tags are encoded")
_RATE_OF_ADAMW = 1e-4
_OWN_RATE = ("prodigy", "dadapt", "automagic")
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def dataset(table: Mapping[str, t.Handler], of: str = "dataset") -> t.Handler:
    """A key of one dataset, `dataset.0.KEY`; `put_sources` makes the sources."""

    def handler(draft: Draft, given: Given) -> None:
        if known := table.get(given.name.split(".", 2)[2]):
            known(draft, given)
        else:
            t.not_offered(f"isotype import does not know this key of a {of}")(draft, given)

    return handler


def datasets_of(draft: Draft) -> list[dict[str, Any]]:
    """Each dataset's keys."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in draft.keys.items():
        if name.startswith(f"{DATASET}."):
            _, index, key = name.split(".", 2)
            found.setdefault(int(index), {})[key] = value
    return [found[index] for index in sorted(found)]


def source(
    name: object, *, caption: object = None, repeats: Any = 1, weight: Any = 1.0, resolution: Sequence[int] = (), draw: Any = None
) -> dict[str, Any]:
    """A source of pictures with the settings that it has."""
    made: dict[str, Any] = {"name": str(name)}
    if caption:
        made["caption"] = str(caption)
    if (times := round(float(repeats or 1))) > 1:
        made["repeats"] = times
    if weight is not None and float(weight) != 1.0:
        made["weight"] = float(weight)
    if resolution:
        made["resolution"] = list(resolution)
    if draw and caption:
        made["draw"] = int(draw)
    return made


def put_sources(draft: Draft, sides: Mapping[str, list[dict[str, Any]]]) -> None:
    """`images.train` and its like, in the shortest form: a source that has the run's resolution only does not name it."""
    for side, sources in sides.items():
        for one in sources:
            if one.get("resolution") == [draft.settings.get("images.resolution")]:
                del one["resolution"]
            elif len(one.get("resolution", ())) == 1:
                one["resolution"] = one["resolution"][0]
        short = [one["name"] if len(one) == 1 else one for one in sources]
        if short:
            draft.settings[side] = short[0] if len(short) == 1 and isinstance(short[0], str) else short


def numbered_folders(folder: str, base: Path, **settings: Any) -> list[dict[str, Any]]:
    """kohya's `10_sks dog`: a folder's repeats, and its caption where pictures have no text file."""
    root = next((found for found in (Path(folder), base / folder) if found.is_dir()), None)
    made = []
    for inside in sorted(root.iterdir()) if root else ():
        if inside.is_dir() and (found := re.match(r"^(\d+)_(.*)$", inside.name)):
            named = not any(inside.glob("*.txt")) and any(path.suffix in _SUFFIXES for path in inside.iterdir())
            one = source(f"{folder.rstrip('/')}/{inside.name}", caption=found[2] if named else None, **settings)
            made.append(one | {"repeats": int(found[1])})
    return made


def largest_side(value: Any) -> int:
    """Of `512`, `"512,768"`, `[512, 768]`: width and height."""
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value))
    return max(int(float(part)) for part in parts)


def several(value: Any) -> list[int]:
    """`[512, 768, 1024]`, `"512,768"`: resolutions of which each picture comes in each."""
    return sorted({largest_side(part) for part in (value if isinstance(value, list) else str(value).split(","))})


def resolution(draft: Draft, given: Given) -> None:
    """`images.resolution` is the largest one; sources of others name theirs."""
    found = several(given.value)
    most = max(*found, int(draft.settings.get("images.resolution", 0)))
    draft.set(given, "images.resolution", most, f"resolution of the source: {found}" if found != [most] else "")


def lokr(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.kind", "lokr", "PEFT's, on the linear layers")


def _optimizer_word(draft: Draft) -> str:
    return next(filter(None, map(draft.said, ("optimizer", "optimizer_type", "train.optimizer", "optimizer.optimizer"))), "")


def rate(draft: Draft, given: Given) -> None:
    """A learning rate. DAdapt and its like find their own, and 1.0 is their factor: AdamW gets a rate of its own in its place."""
    word = _optimizer_word(draft)
    if t.OPTIMIZERS.get(word) != "prodigy" and (word.startswith(_OWN_RATE) or float(given.value) > 0.05):
        note = f"{given.value} is the factor of {word or 'an optimizer'} that finds its own rate; AdamW would diverge with it"
        draft.set(given, "train.learning_rate", _RATE_OF_ADAMW, note)
    else:
        draft.set(given, "train.learning_rate", t.as_number(given.value))


def text_rate(draft: Draft, given: Given) -> None:
    """A rate of text encoders, or one for each. The factor of an optimizer that finds its own rate is none."""
    rates = [float(one) for one in (given.value if isinstance(given.value, list) else [given.value])]
    draft.settings["adapter.text_encoders"] = True
    if max(rates) > 0.05 or _optimizer_word(draft).startswith(_OWN_RATE):
        draft.changed(given, "of an optimizer that finds its own rate; adapter.text_encoders has train.learning_rate")
    else:
        note = "with adapter.text_encoders" if min(rates) > 0 else "one rate for all: a trained encoder has a rate above 0"
        draft.set(given, "adapter.text_encoder_rate", rates if len(set(rates)) > 1 and min(rates) > 0 else max(rates), note)


def min_snr(draft: Draft, given: Given) -> None:
    """`snr_gamma`, `min_snr_gamma`"""
    draft.settings["diffusion.weighting"] = "min_snr"
    draft.set(given, "diffusion.snr_gamma", float(given.value), "with diffusion.weighting: min_snr")


def of_1000(target: str) -> t.Handler:
    """A timestep of 1000 as a share."""
    return t.to(target, lambda value: float(value) / 1000, "a share of 1000 timesteps")


def preset_of(draft: Draft, mixed: object, *, full: bool = False) -> None:
    """`precision.preset`, by the dtype of the products. full: weights in that dtype too."""
    adapter = draft.settings.get("adapter.kind") != "none"
    word = str(mixed or "no").lower().replace("bfloat16", "bf16").replace("float16", "fp16").replace("bfloat_16", "bf16")
    bf16 = "bf16-lora" if adapter else "bf16-pure" if full else "bf16-mixed"
    draft.default("precision.preset", {"bf16": bf16, "fp16": "fp16-mixed"}.get(word, "fp32"))


def without_text_encoders(draft: Draft) -> None:
    """Where there is no LoRA, text encoders have none."""
    for key in ("adapter.text_encoders", "adapter.text_encoder_rate") if draft.settings.get("adapter.kind") != "lora" else ():
        draft.settings.pop(key, None)


def without_adapters_on_the_way(draft: Draft) -> None:
    """Every weight is trained: no adapter is written."""
    for key in ("run.adapters_every", "run.adapter_format"):
        draft.settings.pop(key, None)


# arguments that kohya's scripts and SimpleTuner have from diffusers' own
SCRIPT: dict[str, t.Handler] = {
    "pretrained_model_name_or_path": t.to("model.name", str),
    "revision": t.to("model.revision"),
    "learning_rate": rate,
    "adam_beta1": t.number("train.beta1"),
    "adam_beta2": t.number("train.beta2"),
    "adam_weight_decay": t.number("train.weight_decay"),
    "adam_epsilon": t.number("train.epsilon"),
    "max_grad_norm": t.number("train.clip"),
    "train_batch_size": t.count("train.batch_size"),
    "gradient_accumulation_steps": t.count("train.accumulate"),
    "gradient_checkpointing": t.either("train.gradient_checkpointing", "layers", "none"),
    "max_train_steps": t.count("train.steps"),
    "lr_scheduler": t.schedule_of({**t.SCHEDULES, "cosine_with_restarts": ("cosine", "without restarts")}),
    "lr_warmup_steps": t.number("train.warmup"),
    "seed": t.count("train.seed"),
    "guidance_scale": t.number("diffusion.guidance"),
    **t.each(min_snr, "snr_gamma min_snr_gamma"),
    "noise_offset": t.number("diffusion.noise_offset"),
    "output_dir": t.to("run.folder"),
    "checkpoints_total_limit": t.count("run.keep"),
    **t.each(t.trackers, "report_to log_with"),
}
