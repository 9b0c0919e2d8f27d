"""The names by which checks and errors mention settings: the keys of a run's file, or the names of
another library's trainer arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SettingNames:
    """The names of settings in messages. The defaults are the keys of a run's file.

    checkpoint_layers  gradient checkpointing of every layer, with its value
    compute_bf16       products in bf16, with its value
    fp32_weights       trained weights in fp32, with its value
    rounded_weights    stochastic rounding of trained weights, with its value
    without_samples    how to train without samples; empty where there is no such setting
    """

    learning_rate: str = "train.learning_rate"
    clip: str = "train.clip"
    batch_size: str = "train.batch_size"
    accumulate: str = "train.accumulate"
    checkpoint_layers: str = "train.gradient_checkpointing: layers"
    preset: str = "precision.preset"
    compute_bf16: str = "precision.compute: bf16"
    fp32_weights: str = "precision.trainable: fp32"
    rounded_weights: str = "precision.rounding: stochastic"
    weight_dtype: str = "precision.trainable, precision.rounding"
    train_data: str = "data.train"
    eval_data: str = "data.eval"
    max_length: str = "data.max_length"
    chat_template: str = "data.chat_template"
    without_samples: str = "run.sample_every: 0 trains without samples"


RUN_FILE_NAMES = SettingNames()
