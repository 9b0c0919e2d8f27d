"""What a model's class keeps in fp32 stays fp32 under a precision, and its norms are not narrowed
behind its back.
"""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from isotype.dtypes import to_torch
from isotype.observe import Observation, Observer
from isotype.precision import Precision
from isotype.precision.apply import apply_precision


def tiny_wan():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
        ffn_dim=16, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip


def put(model, preset):
    precision = Precision.preset(preset)
    apply_precision(model, precision, device_type="cpu")
    seen = Observer(model, precision).observe_tensors(Observation(1))
    assert seen.violations == []


def test_wan_keeps_its_fp32_modules_and_modulates_norms_in_fp32():
    model = tiny_wan().requires_grad_(False)
    put(model, "bf16-lora")
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert (
        dtypes["scale_shift_table"]
        == dtypes["condition_embedder.time_embedder.linear_1.weight"]
        == torch.float32
    )
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16
    wide = []
    # the last is not in the class's list, and modulated in fp32 too
    for norm in (model.blocks[0].norm1, model.norm_out):
        norm.register_forward_hook(
            lambda module, args, output: wide.append((args[0].dtype, output.dtype))
        )
    with torch.no_grad():
        model(
            torch.randn(1, 4, 1, 4, 4),
            timestep=torch.tensor([500]),
            encoder_hidden_states=torch.randn(1, 3, 8),
        )
    assert wide == [(torch.float32, torch.float32)] * 2


@pytest.mark.parametrize(
    ("preset", "kept"), [("fp16-mixed", torch.float32), ("bf16-lora", torch.bfloat16)]
)
def test_t5_keeps_wo_in_fp16_only_as_transformers_does(preset, kept):
    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).requires_grad_(False)
    put(model, preset)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["encoder.block.0.layer.1.DenseReluDense.wo.weight"] == kept
    assert dtypes["encoder.block.0.layer.0.SelfAttention.q.weight"] == to_torch(
        Precision.preset(preset).base
    )
