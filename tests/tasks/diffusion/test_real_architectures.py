"""Real architectures from their configurations: the weights they are known to have, and what a LoRA on them holds."""

from __future__ import annotations

import pytest
from benchmarks.diffusion_plans import held, write_folder

from isotype.tasks.diffusion.pipeline import PipelineFolder

# all weights, as the checkpoints have them
KNOWN = {"FLUX.1-dev": 11_901_408_320, "stable-diffusion-3.5-large": 8_056_627_520, "Qwen-Image": 20_430_401_088}


@pytest.mark.full
@pytest.mark.slow  # ten seconds each: PEFT puts an adapter on every linear layer
@pytest.mark.parametrize("name", list(KNOWN))
def test_held_bytes_are_those_of_the_checkpoint(name):
    total, trained, taken = held(name, "bf16-lora")
    assert total == KNOWN[name]
    # bf16 weights; of a trained one in fp32 the weight, its gradient and two moments
    assert taken == 2 * total + 16 * trained


def test_a_folder_of_configurations_is_enough_for_an_outline(tmp_path):
    folder = PipelineFolder.open(str(write_folder(tmp_path, "stable-diffusion-3.5-large")))
    assert sum(p.numel() for p in folder.denoiser_outline().parameters()) == KNOWN["stable-diffusion-3.5-large"]
