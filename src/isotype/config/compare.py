"""Compares two configurations key by key, and says which keys a resumed run may change. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .keys import key_schemas
from .schema import RunConfig
from .yaml_text import write_value

# Reason why a resumed run may change a key -> the keys with this reason. The steps before the
# change stay valid. After a change of any other key no single configuration would describe the
# result.
_KEYS_BY_REASON = {
    "the run continues on another device; results are not bit-identical": "model.device",
    "only the place of the tokenised rows changes": "data.cache",
    "only the place of the latents changes": "images.cache",
    "the schedule is stretched from this step on": "train.steps train.epochs",
    "it applies from this step on": (
        "train.learning_rate train.schedule train.warmup train.decay train.min_learning_rate"
        " train.clip train.deterministic"
    ),
    "it changes the memory that a step needs, not its results": (
        "train.gradient_checkpointing train.checkpointed_layers train.keep_attention train.memory"
    ),
    "it changes when the run evaluates, not its training": "train.eval_every",
    "the evaluation loss does not depend on it": "train.eval_batch_size",
    "it changes when the run stops": "train.patience train.stop_on",
    "the resumed run stays in its own folder": "run.folder",
    "it changes when the run saves": "run.save_every",
    "it changes which weights become the result": "run.save",
    "it changes which files are kept": "run.keep run.adapters_keep",
    "it changes which files are written": (
        "run.adapters_every run.adapter_format run.log_every run.report run.trackers"
    ),
    "it changes when the run samples, not its training": "run.sample_every",
    "it changes which samples are made, not the training": "run.samples run.sample_tokens",
    "it changes how samples are drawn, not the training": (
        "run.sample_steps run.sample_size run.sample_frames run.sample_guidance"
    ),
    "it changes when the run observes dtypes": "run.observe_every",
    "it changes where the result is uploaded": "run.push_to_hub",
    "it changes what is uploaded": "run.push_merged",
    "it changes who can see the upload": "run.push_private",
    "the same steps on other processes; results are not bit-identical": "parallel.kind",
    "it changes how long a process waits for another one": "parallel.timeout",
}
ALLOWED_CHANGES = {
    key: reason for reason, names in _KEYS_BY_REASON.items() for key in names.split()
}
PATH_KEYS = (
    "model.name", "model.tokenizer", "model.vae", "data.train", "data.eval", "data.chat_template",
    "images.train", "images.eval", "images.regularisation", "images.masks", "images.controls", "adapter.start_from",
)  # fmt: skip
AUTO_KEYS = (
    "train.gradient_checkpointing",
    "train.checkpointed_layers",
    "train.keep_attention",
)


@dataclass(frozen=True)
class Change:
    """A key with two different values. `allowed` is true if a resumed run may change the key;
    `reason` says why.
    """

    key: str
    old: Any
    new: Any
    allowed: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {write_value(self.old)} -> {write_value(self.new)} ({self.reason})"


def compare(
    old: RunConfig, new: RunConfig, *, auto_preset: str = "auto", auto_base: str = ""
) -> list[Change]:
    """Returns every key whose value differs, in the order of the schema.

    If the new configuration has `gradient_checkpointing: auto`, the keys that control recomputation
    are not compared, because the old configuration contains the values that `auto` chose for the
    earlier run.

    auto_preset  the preset that `precision.preset: auto` selects on the new run's device;
                 resolved.yaml contains this preset instead of `auto`
    auto_base  the `precision.base` that `auto` takes from a checkpoint that was published
               quantised; resolved.yaml contains this value too
    """
    changes = []
    for key in key_schemas():
        section, _, name = key.partition(".")
        old_value = getattr(getattr(old, section), name)
        new_value = getattr(getattr(new, section), name)
        if key == "precision.preset" and new_value == "auto":
            new_value = auto_preset
        if key == "precision.base" and new_value is None:
            new_value = auto_base or None
        if key in AUTO_KEYS and new.train.gradient_checkpointing == "auto":
            continue
        if old_value != new_value:
            reason = ALLOWED_CHANGES.get(key)
            if key == "data.on_bad_row" and new_value == "skip":
                reason = "the data had no bad row so far"
            if key in PATH_KEYS:
                refusal = (
                    "it names other data or another model, unless the same was moved or renamed"
                )
            else:
                refusal = "the steps so far were trained with the old value"
            if key == "train.optimizer":
                refusal += "; the optimizer states start again from zero"
            changes.append(Change(key, old_value, new_value, reason is not None, reason or refusal))
    return changes
