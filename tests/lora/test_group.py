"""Q, K and V, gate and up: one product for each group, PEFT's results whatever happens between the
calls.
"""

import copy

import torch
import transformers
from torch import nn

from isotype.lora import fuse_lora
from tests.api import SHARED_OUTPUT

from .layers import FEATURES, adapted, assert_same, fused_nodes, inputs, nf4_linear, results


class Attention(nn.Module):
    def __init__(self, make=lambda out: nn.Linear(FEATURES, out)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = make(48), make(32), make(32)
        self.is_loaded_in_4bit = hasattr(self.q_proj, "quant_state")

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.cat([q, k.tanh(), v * 2], dim=-1)


def fused_copy(model):
    made = copy.deepcopy(model)
    assert all(line.op for line in fuse_lora(made))
    return made


def test_result_is_pefts_in_one_product():
    packed = Attention(lambda out: nf4_linear(out=out, compute=torch.float32))
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 3}}
    for model in (adapted(Attention(), use_rslora=True), adapted(packed, **patterns)):
        fused = fused_copy(model)
        assert_same(results(fused, inputs()), results(model, inputs()))
        assert fused_nodes(fused(inputs())) == {"LoraGroup": 1}


class UpFirst(nn.Module):
    """Calls the layers of its groups in another order, as ERNIE-Image and Falcon-H1 do."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(FEATURES, 32), nn.Linear(FEATURES, 32)
        self.to_q, self.to_k, self.to_v = (nn.Linear(FEATURES, 16) for _ in range(3))

    def forward(self, x):
        v, q, k = self.to_v(x), self.to_q(x), self.to_k(x)
        return torch.cat([self.up_proj(x) * self.gate_proj(x).tanh(), q, k.tanh(), v * 2], dim=-1)


def test_the_layer_that_is_called_first_computes_its_group_once_and_no_output_stays():
    model = adapted(UpFirst(), lora_dropout=0.0)
    fused = fused_copy(model)
    assert_same(results(fused, inputs()), results(model, inputs()))
    assert fused_nodes(fused(inputs())) == {"LoraGroup": 2}
    kept = [name for name, layer in fused.named_modules() if SHARED_OUTPUT in vars(layer)]
    assert not kept, "an output that no call takes keeps its graph until the next step"


def test_trainable_weights_and_biases():
    model = adapted(Attention())
    model.requires_grad_()
    got = results(fused_copy(model), inputs())
    assert_same(got, results(model, inputs()))
    assert len(got) == 14


def test_members_that_differ_in_scale_and_drop_out_go_together():
    model = adapted(Attention(), lora_dropout=0.2)
    model.base_model.model.v_proj.scaling["default"] = 4.0
    fused = fused_copy(model)
    assert_same(results(fused, inputs()), results(model, inputs()))
    assert fused_nodes(fused(inputs())) == {"LoraGroup": 1}


def test_members_that_run_pefts_code_leave_the_group():
    model = adapted(Attention())
    fused = fused_copy(model)
    for each in (model, fused):
        each.base_model.model.k_proj.base_layer.register_forward_hook(
            lambda module, args, output: output * 3
        )
    fuse_lora(fused)
    assert_same(results(fused, inputs()), results(model, inputs()))
    assert fused_nodes(fused(inputs())) == {"LoraLinear": 2}


def bart():
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return adapted(transformers.BartForConditionalGeneration(config), lora_dropout=0.3).train()


def test_the_query_of_a_cross_attention_shares_no_product_and_draws_pefts_masks():
    """Self- and cross-attention are of one class in BART, and a product in vain would draw masks
    that PEFT's layers do not draw.
    """
    model = bart()
    fused = fused_copy(model)
    ids = torch.arange(3, 33).view(2, 15)

    def gradients(one):
        torch.manual_seed(1)
        one(input_ids=ids, labels=ids.flip(1)).loss.backward()
        return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}

    expected = gradients(model)
    assert_same(gradients(fused), expected, relative=1e-5)
    # Q, K and V of the encoder and of the decoder; K and V of the decoder's look at the encoder
    assert fused_nodes(fused(input_ids=ids, labels=ids.flip(1)).loss)["LoraGroup"] == 3
