"""FLOPs of a step, by hand."""

import torch

from isotype.tasks.language.task import step_flops
from tests.models import tiny


def test_attention_is_counted_by_the_layers_own_heads():
    plain = tiny("llama")  # 2 layers of 4 heads of 8
    assert step_flops(plain, plain.config).per_square == 6 * 2 * 4 * 8
    # two sliding layers of 4 heads of 8, a full one of 4 heads of 16: transformers refuses to name one size for all
    differing = tiny("gemma4_unified_text", num_hidden_layers=3, head_dim=8, global_head_dim=16)
    assert step_flops(differing, differing.config).per_square == 6 * 4 * (8 + 8 + 16)
    products = [m for m in differing.modules() if isinstance(m, torch.nn.Linear)]
    assert step_flops(differing, differing.config).per_token == 6 * sum(m.weight.numel() for m in products)


def test_of_stacked_experts_those_are_counted_that_a_token_is_sent_to():
    model = tiny("mixtral")  # two of four experts
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    assert step_flops(model, model.config).per_token == 6 * linear + 6 * stacked / 2
