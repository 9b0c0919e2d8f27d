"""A model of which a process keeps a part is made as the whole one: the same adapter, the same values, the same manifest."""

from __future__ import annotations

import pytest
import torch

from isotype.config.schema import RunConfig
from isotype.model.build import build_model
from isotype.model.load import Source, load_tokenizer
from isotype.precision import PRESETS
from isotype.precision.apply import inner_model
from isotype.precision.parts import Part

ADAPTERS = {
    "lora": {"kind": "lora", "r": 4}, "head trained": {"kind": "lora", "r": 4, "modules_to_save": ["lm_head"]}, "none": {"kind": "none"},
}  # fmt: skip


@pytest.mark.parametrize(("preset", "adapter"), [("bf16-mixed", "none"), ("nf4-lora", "lora")])
def test_a_part_lies_on_the_cpu_and_is_made_for_the_device_of_the_run(preset, adapter, workshop):
    """The processes cut it there and move their rows to the GPU; autocast is the GPU's."""
    config = RunConfig.model_validate({"model": {"name": str(workshop.base), "allow_unquantised": True}, "adapter": ADAPTERS[adapter]})
    tokenizer = load_tokenizer(config.model)
    model, _ = build_model(config, PRESETS[preset], Source(str(workshop.base)), tokenizer, torch.device("cuda"), Part(0, 2))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert inner_model(model)._isotype_precision.device_type == "cuda"
