"""`compare`: two configurations key by key, and which differences a resumed run may have. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .keys import keys
from .schema import RunConfig
from .yaml_text import write_value

# Why a change is allowed -> the keys that leave the steps already done valid. Any other change
# would make the result one that no single configuration describes.
_ALLOWED_CHANGES = {
    "the same run elsewhere; not bit for bit": "model.device",
    "where tokenised rows are kept, not what they are": "data.cache",
    "where latents are kept, not what they are": "images.cache",
    "the schedule is stretched from here on": "train.steps train.epochs",
    "from here on": (
        "train.learning_rate train.schedule train.warmup train.decay train.min_learning_rate"
        " train.clip train.deterministic"
    ),
    "the same numbers in other memory": (
        "train.gradient_checkpointing train.checkpointed_layers train.keep_attention train.memory"
    ),
    "when to look, not what is learnt": "train.eval_every",
    "the evaluation loss does not depend on it": "train.eval_batch_size",
    "when to stop": "train.patience train.stop_on",
    "the resumed run stays in its own folder": "run.folder",
    "when to save": "run.save_every",
    "which weights are the result": "run.save",
    "what is kept": "run.keep run.adapters_keep",
    "what is written": (
        "run.adapters_every run.adapter_format run.log_every run.report run.trackers"
    ),
    "when to sample; training does not see it": "run.sample_every",
    "what to sample; training does not see it": "run.samples run.sample_tokens",
    "how to sample; training does not see it": (
        "run.sample_steps run.sample_size run.sample_guidance"
    ),
    "when to look": "run.observe_every",
    "where the result goes": "run.push_to_hub",
    "what goes there": "run.push_merged",
    "who sees it there": "run.push_private",
    "the same steps on other machines; not bit for bit": "parallel.kind",
    "how long to wait for another process": "parallel.timeout",
}
MAY_CHANGE = {key: reason for reason, names in _ALLOWED_CHANGES.items() for key in names.split()}
PATH_KEYS = (
    "model.name", "model.tokenizer", "data.train", "data.eval", "data.chat_template",
    "images.train", "images.eval", "images.regularisation", "images.masks", "images.controls", "adapter.start_from",
)  # fmt: skip
AUTO_KEYS = (
    "train.gradient_checkpointing",
    "train.checkpointed_layers",
    "train.keep_attention",
)


@dataclass(frozen=True)
class Change:
    """One key that differs. `allowed`: whether a resumed run may change it; `reason`: the reason."""

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
    """Every key whose value differs, in the order of the schema.

    Where the new one leaves recomputation to `auto_preset`, the old one's is no difference: what `auto_preset`
    chose the last time stands there.

    auto_preset  what `precision.preset: auto` is on the device of the new one: resolved.yaml has the
          preset it became, not the word
    auto_base  what that `auto_preset` takes from a checkpoint that was published quantised, which stands there
          too
    """
    changes = []
    for key in keys():
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
            reason = MAY_CHANGE.get(key)
            if key == "data.on_bad_row" and new_value == "skip":
                reason = "there was no bad row so far"
            if key in PATH_KEYS:
                refusal = "another one, unless it was only moved or renamed"
            else:
                refusal = "what was trained so far had the old one"
            if key == "train.optimizer":
                refusal += "; its states begin anew"
            changes.append(Change(key, old_value, new_value, reason is not None, reason or refusal))
    return changes
