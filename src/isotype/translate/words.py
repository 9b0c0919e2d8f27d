"""Names of optimizers, schedules and attention implementations: the other tools' and Isotype's."""

from __future__ import annotations

from typing import Any

from .account import Draft, Given, number, truth

_ADAMW = [
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_torch_xla",
    "torch.optim.adamw",
    "fused_adamw",
    "adamw_apex_fused",
]
_ADAMW_8BIT = ["adamw_8bit", "adamw_bnb_8bit", "bitsandbytes.optim.adamw8bit", "adamw8bit", "torchao.optim.adamw8bit", "adamw_torch_8bit"]
_PAGED_8BIT = ["paged_adamw_8bit", "bitsandbytes.optim.pagedadamw8bit"]
_PAGED = ["paged_adamw_32bit", "paged_adamw", "bitsandbytes.optim.pagedadamw"]
_SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": "cosine",
}
_ATTENTION = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "fa2": "flash",
    "sdpa": "sdpa",
    "eager": "eager",
    "disabled": "eager",
    "flex_attention": "flex",
    "flex": "flex",
}


def optimizer(draft: Draft, given: Given) -> None:
    word = str(given.value).rpartition("OptimizerNames.")[2].lower()
    if word in _ADAMW:
        draft.set(given, "train.optimizer", "adamw")
    elif word in _ADAMW_8BIT:
        draft.set(given, "train.optimizer", "adamw8bit")
    elif word in _PAGED_8BIT:
        draft.set(given, "train.optimizer", "adamw8bit", "not paged: states stay on the GPU")
    elif word in _PAGED:
        draft.set(given, "train.optimizer", "adamw", "not paged: states stay on the GPU")
    else:
        draft.not_offered(given, "train.optimizer is adamw or adamw8bit; adamw is used, its learning rate may have to differ")


def schedule(draft: Draft, given: Given) -> None:
    word = str(given.value).rpartition("SchedulerType.")[2].lower()
    if word not in _SCHEDULES:
        draft.not_offered(given, "train.schedule is cosine, linear, constant or wsd; cosine is used")
        return
    draft.set(given, "train.schedule", _SCHEDULES[word], "its end is train.min_learning_rate" if "min_lr" in word else "")
    if word == "constant":  # that schedule has no warm-up, and ignores warmup_ratio
        draft.settings["train.warmup"] = 0


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
    word = str(given.value).lower()
    if word in _ATTENTION:
        draft.set(given, "model.attention", _ATTENTION[word])
    elif word in ("auto", "none", "null"):
        draft.no_effect(given, "the default, sdpa")
    else:
        draft.not_offered(given, "model.attention is sdpa, eager, flash or flex; sdpa is used")


def attention_switch(name: str) -> Any:
    """`flash_attention: true` sets model.attention."""

    def handler(draft: Draft, given: Given) -> None:
        if truth(given.value):
            draft.set(given, "model.attention", name)
        else:
            draft.no_effect(given, "switched off")

    return handler


def checkpointing(draft: Draft, given: Given) -> None:
    value = given.value
    if str(value).lower() in ("unsloth", "offload", "offload_disk"):
        draft.set(
            given, "train.gradient_checkpointing", "layers+offload", "recomputes layers and keeps what is left in host memory (GPU only)"
        )
    else:
        draft.set(given, "train.gradient_checkpointing", "layers" if truth(value) else "none")


def trackers(draft: Draft, given: Given) -> None:
    asked = given.value if isinstance(given.value, list) else [given.value]
    known = [str(word).lower() for word in asked if str(word).lower() in ("tensorboard", "wandb")]
    other = [str(word) for word in asked if str(word).lower() not in ("tensorboard", "wandb", "none", "[]", "null")]
    if known:
        draft.set(given, "run.trackers", known, f"{', '.join(other)}: not offered" if other else "")
    elif other and other != ["all"]:
        draft.not_offered(given, "run.trackers is tensorboard or wandb; metrics.jsonl is always written")
    else:
        draft.no_effect(given, "metrics.jsonl and report.html are always written")


def evaluation(draft: Draft, given: Given) -> None:
    if str(given.value).lower() in ("no", "false", "none"):
        draft.settings["data.eval_split"] = 0
        draft.set(given, "data.eval_split", 0, "no rows are held out")
    else:
        draft.no_effect(given, "evaluations come by train.eval_every, by default ten in a run")


def saving(draft: Draft, given: Given) -> None:
    draft.no_effect(given, "checkpoints come by run.save_every, by default at every evaluation, and one at the end")


def targets(draft: Draft, given: Given) -> None:
    value = given.value
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if value in ("all", "all-linear", ["all-linear"], ["all"]):
        draft.set(given, "adapter.targets", "all-linear")
    elif isinstance(value, str):
        draft.set(given, "adapter.targets", value.split())
    else:
        draft.set(given, "adapter.targets", value)


def dropout(draft: Draft, given: Given) -> None:
    draft.set(given, "adapter.dropout", number(given.value or 0))
