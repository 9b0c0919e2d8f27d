"""Buffers that no file holds have the constructor's values, and rotary tables do not depend on earlier batches."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from isotype.model.load import Source, load_base
from isotype.precision import PRESETS


class OwnConfig(LlamaConfig):
    model_type = "own_buffers"
    fails = False


class Own(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config.fails and not torch.empty(0).is_meta:  # transformers builds a model that it loads on meta
            raise RuntimeError("no")
        made = nn.Module()
        made.register_buffer("angles", torch.arange(4).float() / 3, persistent=False)
        made.register_buffer("numbers", torch.arange(5), persistent=False)
        made.register_buffer("below", torch.ones(3, 3).tril().bool(), persistent=False)
        made.register_buffer("kept", torch.full((2,), 7.0))
        self.own = made


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = OwnConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    Own(config).save_pretrained(tmp_path)
    AutoModelForCausalLM.register(OwnConfig, Own, exist_ok=True)
    AutoConfig.register("own_buffers", OwnConfig, exist_ok=True)
    return tmp_path


def load(folder, notes, name="fp32"):
    return load_base(Source(str(folder)), PRESETS[name], attention="eager", device=torch.device("cpu"), trainable=True, notes=notes)


@pytest.mark.parametrize("name", ["fp32", "bf16-pure"])
def test_buffers_have_the_constructors_values(folder, name):
    notes = []
    own = load(folder, notes, name).own
    assert torch.equal(own.angles, torch.arange(4).float() / 3)
    assert torch.equal(own.numbers, torch.arange(5))
    assert torch.equal(own.below, torch.ones(3, 3).tril().bool())
    assert torch.equal(own.kept.float(), torch.full((2,), 7.0))
    assert notes[0].startswith("3 buffers that no file holds, own.angles first")
    assert not torch.are_deterministic_algorithms_enabled()


def logits(model, length):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 3 + length)[None]).logits
