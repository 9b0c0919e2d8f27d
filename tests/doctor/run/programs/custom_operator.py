"""A custom operator with a registered backward, but without a rule for autocast, is used under it."""

import sys

import torch
from torch import nn


@torch.library.custom_op("isotype_tests::scaled_product", mutates_args=())
def scaled_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight.t()) * 0.5


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return (grad @ weight) * 0.5, (grad.t() @ x) * 0.5


scaled_product.register_autograd(backward, setup_context=setup_context)
if "repaired" in sys.argv:
    torch.library.register_autocast("isotype_tests::scaled_product", "cpu", torch.bfloat16)


class ScaledLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return scaled_product(self.first(x), self.weight)


layer = ScaledLayer()
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = layer(torch.randn(2, 4)).float().mean()
loss.backward()
