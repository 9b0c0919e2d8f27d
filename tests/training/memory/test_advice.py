"""Advice for a step that is too large: nothing that the settings have already."""

from __future__ import annotations

import pytest

from isotype.config.load import load
from isotype.training.memory.auto import less_memory


@pytest.mark.parametrize(
    ("settings", "preset", "given", "withheld"),
    [
        ([], "lora", ["train.gradient_checkpointing: layers", "train.batch_size", "data.max_length", "--preset qlora"], ["images"]),
        (["train.gradient_checkpointing=layers"], "lora", ["train.batch_size"], ["gradient_checkpointing"]),
        (["train.batch_size=1"], "lora", ["data.max_length"], ["batch_size"]),
        ([], "qlora", ["train.batch_size"], ["qlora"]),
        (["precision.base=nf4"], "lora", ["train.batch_size"], ["qlora"]),
        (["images.train=pictures"], "lora", ["images.resolution"], ["data."]),
    ],
)
def test_advice_does_not_repeat_current_settings(settings, preset, given, withheld):
    config = load(None, settings, preset=preset).config
    advice = less_memory(config, config.train.gradient_checkpointing)
    assert all(words in advice for words in given)
    assert not any(words in advice for words in withheld)


def test_one_way_left_is_told_alone():
    config = load(None, ["train.batch_size=1"], preset="qlora").config
    assert less_memory(config, "layers+offload") == "a smaller data.max_length"
