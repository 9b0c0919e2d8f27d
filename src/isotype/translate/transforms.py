"""The transforms that the tools' tables are made of: each says what becomes of one key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .draft import Draft, Fate, Given, Outcome

Handler = Callable[[Draft, Given], None]
OFF = (None, "", "none", "None", "null", False, "false")  # a key with one of these is switched off
GPUS = "not set in the file: it says what a step is, not on how many GPUs"
IRRELEVANT = "nothing here depends on it"
OWN_OPS = "Isotype's own ops are used by default: model.optimize"
OTHER_OPTIMIZERS = "train.optimizer has other ones (docs/optimizers.md); adamw is used, its learning rate may have to differ"
SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": ("cosine", "its end is train.min_learning_rate"),
    "cosine_warmup_with_min_lr": ("cosine", "its end is train.min_learning_rate"),
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
}
_NOT_PAGED = "not paged: states stay on the GPU"
# ours -> other tools' words
_OPTIMIZER_WORDS = {
    "adamw": "adamw adamw_torch adamw_torch_fused adamw_hf adamw_torch_xla torch.optim.adamw fused_adamw adamw_apex_fused optimi-adamw "
    "bnb-adamw",
    "adamw8bit": "adamw8bit adamw_8bit adamw_bnb_8bit bitsandbytes.optim.adamw8bit torchao.optim.adamw8bit adamw_torch_8bit "
    "adamw8bitkahan ao-adamw8bit bnb-adamw8bit",
    "adamw8bit-paged": "paged_adamw_8bit bitsandbytes.optim.pagedadamw8bit pagedadamw8bit bnb-adamw8bit-paged",
    "lion": "lion lion_32bit bitsandbytes.optim.lion bnb-lion optimi-lion",
    "lion8bit": "lion8bit lion_8bit bitsandbytes.optim.lion8bit bnb-lion8bit",
    "schedule-free": "schedule_free_adamw adamw_schedulefree adamwschedulefree",
    "muon": "muon torch.optim.muon",
    "adafactor": "adafactor torch.optim.adafactor",
    "prodigy": "prodigy",
}
OPTIMIZERS = {theirs: ours for ours, words in _OPTIMIZER_WORDS.items() for theirs in words.split()} | {
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.pagedadamw", "bnb-adamw-paged"), ("adamw", _NOT_PAGED)),
    **dict.fromkeys(("paged_lion_32bit", "bnb-lion-paged"), ("lion", _NOT_PAGED)),
    **dict.fromkeys(("paged_lion_8bit", "pagedlion8bit", "bnb-lion8bit-paged"), ("lion8bit", _NOT_PAGED)),
}
_ATTENTION = {
    **dict.fromkeys(("flash_attention_2", "flash_attention_3", "fa2"), "flash"),
    "sdpa": "sdpa",
    **dict.fromkeys(("eager", "disabled"), "eager"),
    **dict.fromkeys(("flex_attention", "flex"), "flex"),
}


def number(value: Any) -> float | int:
    """1e-5 is text in YAML 1.1, and on a command line everything is."""
    parsed = float(value)
    return int(parsed) if parsed == int(parsed) and "." not in str(value) and "e" not in str(value).lower() else parsed


def truth(value: Any) -> bool:
    return str(value).strip().lower() in ("true", "yes", "on", "1", "auto")


def each(handler: Handler, names: str) -> dict[str, Handler]:
    """Rows of a table for keys of which the same becomes; a name that ends in `*` is a family of keys."""
    return dict.fromkeys(names.split(), handler)


def to(target: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Handler:
    return lambda draft, given: draft.set(given, target, convert(given.value), note)


def to_number(target: str) -> Handler:
    return to(target, number)


def to_truth(target: str) -> Handler:
    return to(target, truth)


def to_count(target: str) -> Handler:
    """A whole number from 1 on; 0 and -1 leave the default."""

    def handler(draft: Draft, given: Given) -> None:
        value = number(given.value)
        if value <= 0:
            draft.no_effect(given, f"{given.value}: the default")
        elif value != int(value):
            draft.not_offered(given, f"a share of the run; {target} is a number of steps")
        else:
            draft.set(given, target, int(value))

    return handler


def to_either(target: str, yes: Any, no: Any) -> Handler:
    """One value where the key is on, another where it is off."""
    return to(target, lambda value: yes if truth(value) else no)


def to_word(target: str, words: Mapping[str, Any], otherwise: str) -> Handler:
    """The word's counterpart (`value`, or `(value, note)`); not offered where there is none."""

    def handler(draft: Draft, given: Given) -> None:
        word = re.sub(r"^.*(?:OptimizerNames|SchedulerType)\.", "", str(given.value)).lower()
        if word not in words:
            draft.not_offered(given, otherwise)
        elif isinstance(words[word], tuple):
            draft.set(given, target, *words[word])
        else:
            draft.set(given, target, words[word])

    return handler


def when_on(target: str, value: Any, off: str = "switched off", note: str = "") -> Handler:
    """Sets `target` where the key is on."""
    return lambda draft, given: draft.set(given, target, value, note) if truth(given.value) else draft.no_effect(given, off)


def no_effect(why: str) -> Handler:
    return lambda draft, given: draft.no_effect(given, why)


def changed(note: str) -> Handler:
    return lambda draft, given: draft.changed(given, note)


def not_offered(use: str) -> Handler:
    """Only where the key is switched on; off, it changes nothing."""

    def handler(draft: Draft, given: Given) -> None:
        if given.value in OFF or given.value in ([], {}):
            draft.no_effect(given, "switched off")
        else:
            draft.not_offered(given, use)

    return handler


def only(words: str, why: str, use: str) -> Handler:
    """The one way that is offered has no effect; others are not offered."""
    return lambda draft, given: draft.no_effect(given, why) if str(given.value) in words.split() else draft.not_offered(given, use)


REFERENCE = "the reference is the model as the run starts, with its adapter; its log-probabilities are computed once"


def to_preference(name: str, *objectives: str, of: Callable[[Draft], str | None] = lambda draft: None) -> Handler:
    """A setting of `preference`, for a method that has it.

    of  reads the method off the whole file, since it may stand after the setting; None: what `train.objective` has by now
    """

    def handler(draft: Draft, given: Given) -> None:
        if (objective := of(draft)) is not None:
            draft.settings["train.objective"] = objective
        if given.value is None:
            draft.no_effect(given, "the default")
        elif draft.settings.get("train.objective") in objectives:
            draft.set(given, f"preference.{name}", number(given.value))
        else:
            draft.no_effect(given, f"of {', '.join(objectives)}")

    return handler


def without_what_preferences_refuse(draft: Draft) -> None:
    """Leaves out settings that other tools ignore or switch off for these methods."""
    objective = draft.settings.get("train.objective")
    left_out = {
        "train.embedding_noise": (objective is not None, "it is for answers that are learnt"),
        "data.packing": (objective is not None, "each answer is judged as a whole"),
        "data.loss_on": (objective is not None, "answers are judged, not their prompts"),
        "adapter.dropout": (objective in ("dpo", "ipo", "kto"), "the reference has none"),
    }
    for key, (refused, why) in left_out.items():
        if refused and draft.settings.pop(key, None) not in (None, False, 0, "assistant"):
            draft.notes.append(f"{key} is left out: {why}")


optimizer = to_word("train.optimizer", OPTIMIZERS, OTHER_OPTIMIZERS)


def settle_optimizer(draft: Draft) -> None:
    """Leaves out or replaces what an optimizer refuses beside it, with a note for each."""
    name, settings = draft.settings.get("train.optimizer", "adamw"), draft.settings
    asked = draft.sources.get("train.optimizer")
    if settings.get("precision.preset") == "bf16-pure" and name != "adamw":
        name = settings["train.optimizer"] = "adamw"  # PR018: the others round to the nearest and take bf16 gradients
        why = "the others cannot round bf16 weights stochastically"
        draft.outcomes = [
            Outcome(asked, Fate.CHANGED, "train.optimizer: adamw", why) if asked is not None and outcome.given is asked else outcome
            for outcome in draft.outcomes
        ]
    if name == "schedule-free" and settings.get("train.schedule", "constant") != "constant":
        settings["train.schedule"] = "constant"
        draft.notes.append("train.schedule: constant; the average of schedule-free takes the place of a schedule")
    if name == "schedule-free" and settings.pop("train.ema", None) is not None:
        draft.notes.append("train.ema is left out: schedule-free averages the weights itself")
    if name == "prodigy" and settings.get("train.learning_rate", 1) != 1:
        settings["train.learning_rate"] = 1
        draft.notes.append("train.learning_rate: 1; prodigy finds the rate itself")
    if name == "adafactor" and settings.pop("train.learning_rate", None) is not None:
        draft.notes.append("train.learning_rate is left out: torch's Adafactor multiplies it by each weight's size; its own is 0.01")
    for key in {"adafactor": ("beta1", "beta2", "epsilon"), "lion": ("epsilon",), "lion8bit": ("epsilon",)}.get(name, ()):
        if settings.pop(f"train.{key}", None) is not None:
            draft.notes.append(f"train.{key} is left out: {name} does not read it")


def start(draft: Draft, given: Given) -> None:
    """PEFT's `init_lora_weights`."""
    word = str(given.value).lower()
    if word == "true":
        draft.no_effect(given, "the default")
    elif word.partition("_niter_")[0] in ("pissa", "olora", "orthogonal"):
        draft.set(given, "adapter.start", word.partition("_niter_")[0], "its start is an exact SVD" if "_niter_" in word else "")
    else:
        draft.not_offered(given, "adapter.start is default, orthogonal, pissa or olora")


def schedule_of(words: Mapping[str, Any]) -> Handler:
    choose = to_word("train.schedule", words, "train.schedule is cosine, linear, constant or wsd; cosine is used")

    def handler(draft: Draft, given: Given) -> None:
        choose(draft, given)
        if str(given.value).lower().endswith("constant"):  # this schedule has no warm-up, and ignores warmup_ratio
            draft.settings["train.warmup"] = 0

    return handler


schedule = schedule_of(SCHEDULES)


def schedule_details(draft: Draft, given: Given) -> None:
    """`lr_scheduler_kwargs`: the lowest learning rate is the only one that is offered."""
    details = given.value if isinstance(given.value, dict) else {}
    rate = details.get("min_lr_rate")
    if rate is None and details.get("min_lr") is not None and draft.keys.get("learning_rate"):
        rate = float(details["min_lr"]) / float(draft.keys["learning_rate"])
    if rate is None:
        draft.not_offered(given, "train.decay and train.min_learning_rate are what schedules take")
    else:
        draft.set(given, "train.min_learning_rate", float(rate))


def warmup_ratio(draft: Draft, given: Given) -> None:
    value = number(given.value or 0)
    if draft.keys.get("warmup_steps") and number(draft.keys["warmup_steps"]) > 0:
        draft.no_effect(given, "warmup_steps wins, there too")
    elif draft.settings.get("train.schedule") == "constant" and draft.settings.get("train.warmup") == 0 and value:
        draft.no_effect(given, "a constant schedule has no warm-up, there too")
    else:
        draft.set(given, "train.warmup", value)


def warmup_steps(draft: Draft, given: Given) -> None:
    value = number(given.value or 0)
    if value == 0 and "warmup_ratio" in draft.keys:
        draft.no_effect(given, "warmup_ratio decides")
    else:
        draft.set(given, "train.warmup", value)


def attention(draft: Draft, given: Given) -> None:
    if str(given.value).lower() in ("auto", "none", "null"):
        draft.no_effect(given, "the default, sdpa")
    else:
        to_word("model.attention", _ATTENTION, "model.attention is sdpa, eager, flash or flex; sdpa is used")(draft, given)


def checkpointing(draft: Draft, given: Given) -> None:
    if str(given.value).lower() in ("unsloth", "offload", "offload_disk"):
        note = "recomputes layers and keeps what is left in host memory (GPU only)"
        draft.set(given, "train.gradient_checkpointing", "layers+offload", note)
    else:
        to_either("train.gradient_checkpointing", "layers", "none")(draft, given)


def trackers(draft: Draft, given: Given) -> None:
    asked = [str(word) for word in (given.value if isinstance(given.value, list) else [given.value])]
    known = [word.lower() for word in asked if word.lower() in ("tensorboard", "wandb")]
    other = [word for word in asked if word.lower() not in ("tensorboard", "wandb", "none", "[]", "null")]
    if known:
        draft.set(given, "run.trackers", known, f"{', '.join(other)}: not offered" if other else "")
    elif other and other != ["all"]:
        draft.not_offered(given, "run.trackers is tensorboard or wandb; metrics.jsonl is always written")
    else:
        draft.no_effect(given, "metrics.jsonl and report.html are always written")


def evaluation(draft: Draft, given: Given) -> None:
    if str(given.value).lower() in ("no", "false", "none"):
        draft.set(given, "data.eval_split", 0, "no rows are held out")
    else:
        draft.no_effect(given, "evaluations come by train.eval_every, by default ten in a run")


def held_out(draft: Draft, given: Given) -> None:
    """`val_set_size`, `val_size`: a share of the rows; a number of rows is not offered."""
    value = number(given.value or 0)
    if value >= 1:
        draft.not_offered(given, "data.eval_split is a share of the rows; data.eval names a file")
    else:
        draft.set(given, "data.eval_split", value)


def targets(draft: Draft, given: Given) -> None:
    value = given.value
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if value in ("all", "all-linear", ["all-linear"], ["all"]):
        value = "all-linear"
    draft.set(given, "adapter.targets", value.split() if isinstance(value, str) and value != "all-linear" else value)


def hold_out_nothing(draft: Draft) -> None:
    """Without evaluation data the other tools train on every row."""
    if "data.eval" in draft.settings:
        draft.settings.pop("data.eval_split", None)
    else:
        draft.default("data.eval_split", 0)
