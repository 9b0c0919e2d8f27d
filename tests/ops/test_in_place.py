"""What an op returns can be written to in place, as a plain op's result can: it is no view that an autograd function has made."""

from __future__ import annotations

import pytest
import torch

from isotype import ops
from isotype.lora.group import lora_group
from isotype.lora.linear import Projection, decide, lora_linear
from isotype.lora.mlp import lora_mlp
from isotype.lora.quantised import forward_4bit
from isotype.ops.backend import using
from tests.models import quantised, tiny


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT, A, B = drawn(8, 8) / 3, drawn(2, 8) / 3, drawn(8, 2) / 3


def projection():
    return Projection(WEIGHT, None, A.clone().requires_grad_(), B.clone().requires_grad_(), None)


def four_bit(x):
    layer = quantised(tiny(hidden_size=64, intermediate_size=64)).model.layers[0].mlp.gate_proj
    return forward_4bit(layer, x.repeat_interleave(8, -1))


def heads(x):
    return x.reshape(1, 1, -1, 8)


def expert_rows(x):
    index = torch.arange(2 * len(x)).view(-1, 2) % 3
    return ops.experts(x, index, torch.full(index.shape, 0.5), drawn(3, 8, 8), drawn(3, 8, 4))


TABLES = drawn(1, 6, 4).cos(), drawn(1, 6, 4).sin()
OPS = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(8)),
    # its sum is the norm's input, which backward needs, as that of a plain norm does
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x, torch.ones(8))[0],
    "silu_mul": lambda x: ops.silu_mul(x, x * 2),
    "gelu_mul": lambda x: ops.gelu_mul(x, x * 2),
    "gelu": lambda x: ops.gelu(x),
    "modulated_layer_norm": lambda x: ops.modulated_layer_norm(x.view(2, -1, 8), x.view(-1, 8)[:2], x.view(-1, 8)[1:3]),
    "gated_residual": lambda x: ops.gated_residual(x.view(2, -1, 8), x.view(2, -1, 8), x.view(-1, 8)[:2]),
    "rope": lambda x: ops.rope(heads(x), heads(x) * 2, *TABLES),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.long)),
    "losses a row": lambda x: ops.cross_entropy(x, torch.zeros(x.shape[:-1], dtype=torch.long), reduction="none"),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, WEIGHT, torch.zeros(x.shape[:-1], dtype=torch.long), reduction="none"),
    "linear_log_probs": lambda x: ops.linear_log_probs(x, WEIGHT, torch.zeros(x.shape[:-1], dtype=torch.long))[0],
    "linear_divergence": lambda x: ops.linear_divergence(x, WEIGHT, x.detach() * 2, WEIGHT),
    "experts": lambda x: expert_rows(x.reshape(-1, 8)),
    "lora_linear": lambda x: lora_linear(x, WEIGHT, A.clone().requires_grad_(), B),
    "lora_group": lambda x: lora_group(x, [projection(), projection()], decide(x, x.dtype, x.dtype, quantised=False, branch_fp32=False)),
    "lora_mlp": lambda x: lora_mlp(
        x, [projection(), projection()], projection(), "silu_mul", decide(x, x.dtype, x.dtype, quantised=False, branch_fp32=False)
    ),
    "linear_4bit": four_bit,
}


def in_place(y):
    y.mul_(1.5)
    y.clamp_(-2, 2)
    y += 0.25
    if y.dim():
        y[..., :1] = 0
    return y


def beside(y):
    y = (y * 1.5).clamp(-2, 2) + 0.25
    return torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], -1) if y.dim() else y


@pytest.mark.parametrize(
    ("path", "shape"), [("cpp", (2, 3, 8)), *(pytest.param("eager", s, marks=pytest.mark.full) for s in [(6, 8), (1, 6, 8)])]
)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_results_can_be_changed_in_place(op, path, shape):
    seen = []
    for change in (in_place, beside):
        x = drawn(*shape).requires_grad_()
        with using(path):
            out = op(x * 1)
            parts = [change(y) for y in (out if isinstance(out, tuple) else (out,))]
            sum((y.square() * (i + 1)).sum() for i, y in enumerate(parts)).backward()
        seen.append([x.grad, *(y.detach() for y in parts)])
    torch.testing.assert_close(*seen)


def test_every_op_is_walked():
    assert {name for name in ops.__all__ if name.islower()} <= {*OPS, "attention"}, "attention keeps its output for backward, as sdpa does"
