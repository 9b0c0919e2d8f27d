"""A batch has the same logits whatever batches came before it."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from isotype.model.load import Source, load_base
from isotype.precision.precision import PRESETS

POSITIONS = 8


def saved(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def logits(model, length):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 3 + length)[None]).logits


def test_a_dynamic_table_does_not_remember_longer_batches(tmp_path):
    plain = LlamaForCausalLM.from_pretrained(saved(tmp_path))
    first = logits(plain, POSITIONS + 2)
    logits(plain, 4 * POSITIONS)
    assert not torch.equal(logits(plain, POSITIONS + 2), first)  # what transformers does

    source = Source(str(tmp_path))
    ours = load_base(source, PRESETS["fp32"], attention="eager", device=torch.device("cpu"), trainable=True)
    for length in (POSITIONS + 2, 4 * POSITIONS, POSITIONS + 2, POSITIONS - 2, POSITIONS + 2):
        fresh = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert torch.equal(logits(ours, length), logits(fresh, length))
