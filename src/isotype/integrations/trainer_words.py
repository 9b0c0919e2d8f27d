"""Translates the names of Isotype's settings in messages of checks into names of a trainer's arguments."""

from __future__ import annotations

_WORDS = {
    "run.sample_every: 0 trains without samples; ": "",
    "train.learning_rate": "learning_rate",
    "train.clip": "max_grad_norm",
    "train.batch_size": "per_device_train_batch_size",
    "train.accumulate": "gradient_accumulation_steps",
    "train.gradient_checkpointing: layers": "gradient_checkpointing=True",
    "precision.compute: ": "",
    "precision.trainable: fp32": "precision='bf16-mixed'",
    "precision.preset": "precision",
    "data.eval": "eval_dataset",
    "data.train": "train_dataset",
    "data.max_length": "max_length",
}


def in_trainers_words(text: str) -> str:
    for ours, theirs in _WORDS.items():
        text = text.replace(ours, theirs)
    return text
