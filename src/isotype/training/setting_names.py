"""Contains the names that checks and error messages use for settings. The names are the keys of a
configuration file, or the names of the arguments of another library's trainer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SettingNames:
    """The names that messages use for the settings. The default names are the keys of a
    configuration file.

    checkpoint_layers  the setting, with its value, for gradient checkpointing of every layer
    compute_bf16       the setting, with its value, for matrix products in bf16
    fp32_weights       the setting, with its value, for trained weights in fp32
    rounded_weights    the setting, with its value, for stochastic rounding of trained weights
    without_samples    how to train without samples; empty if there is no such setting
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
