"""`compare`: two configurations key by key, and which differences a resumed run may have. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .keys import keys
from .schema import RunConfig
from .yaml_text import write_value

# Keys that leave the steps already done valid. Everything else would make the result one that no single configuration describes.
MAY_CHANGE = {
    "model.device": "the same run elsewhere; not bit for bit",
    "data.cache": "where tokenised rows are kept, not what they are",
    "images.cache": "where latents are kept, not what they are",
    "train.steps": "the schedule is stretched from here on",
    "train.epochs": "the schedule is stretched from here on",
    "train.learning_rate": "from here on",
    "train.schedule": "from here on",
    "train.warmup": "from here on",
    "train.decay": "from here on",
    "train.min_learning_rate": "from here on",
    "train.clip": "from here on",
    "train.gradient_checkpointing": "the same numbers in other memory",
    "train.checkpointed_layers": "the same numbers in other memory",
    "train.keep_attention": "the same numbers in other memory",
    "train.memory": "the same numbers in other memory",
    "train.deterministic": "from here on",
    "train.eval_every": "when to look, not what is learnt",
    "train.eval_batch_size": "the evaluation loss does not depend on it",
    "train.patience": "when to stop",
    "train.stop_on": "when to stop",
    "run.folder": "the resumed run stays in its own folder",
    "run.save_every": "when to save",
    "run.keep": "what is kept",
    "run.adapters_every": "what is written",
    "run.adapters_keep": "what is kept",
    "run.adapter_format": "what is written",
    "run.log_every": "what is written",
    "run.sample_every": "when to sample; training does not see it",
    "run.samples": "what to sample; training does not see it",
    "run.sample_tokens": "what to sample; training does not see it",
    "run.sample_steps": "how to sample; training does not see it",
    "run.sample_size": "how to sample; training does not see it",
    "run.sample_guidance": "how to sample; training does not see it",
    "run.observe_every": "when to look",
    "run.report": "what is written",
    "run.trackers": "what is written",
    "run.push_to_hub": "where the result goes",
    "run.push_merged": "what goes there",
    "run.push_private": "who sees it there",
    "parallel.kind": "the same steps on other machines; not bit for bit",
    "parallel.timeout": "how long to wait for another process",
}
PLACES = (
    "model.name", "model.tokenizer", "data.train", "data.eval", "data.chat_template",
    "images.train", "images.eval", "images.regularisation", "images.masks", "images.controls", "adapter.start_from",
)  # fmt: skip
CHOSEN_BY_AUTO = ("train.gradient_checkpointing", "train.checkpointed_layers", "train.keep_attention")


@dataclass(frozen=True)
class Change:
    """One key that differs. `allowed`: whether a resumed run may change it; `why`: the reason."""

    key: str
    old: Any
    new: Any
    allowed: bool
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {write_value(self.old)} -> {write_value(self.new)} ({self.why})"


def compare(old: RunConfig, new: RunConfig, *, auto: str = "auto", base: str = "") -> list[Change]:
    """Every key whose value differs, in the order of the schema.

    Where the new one leaves recomputation to `auto`, the old one's is no difference: what `auto` chose the last time stands there.

    auto  what `precision.preset: auto` is on the device of the new one: resolved.yaml has the preset it became, not the word
    base  what that `auto` takes from a checkpoint that was published quantised, which stands there too
    """
    changes = []
    for key in keys():
        section, _, name = key.partition(".")
        before, after = getattr(getattr(old, section), name), getattr(getattr(new, section), name)
        if key == "precision.preset" and after == "auto":
            after = auto
        if key == "precision.base" and after is None:
            after = base or None
        if key in CHOSEN_BY_AUTO and new.train.gradient_checkpointing == "auto":
            continue
        if before != after:
            why = MAY_CHANGE.get(key)
            if key == "data.on_bad_row" and after == "skip":
                why = "there was no bad row so far"
            another = "another one, unless it was only moved or renamed" if key in PLACES else "what was trained so far had the old one"
            if key == "train.optimizer":
                another += "; its states begin anew"
            changes.append(Change(key, before, after, why is not None, why or another))
    return changes
