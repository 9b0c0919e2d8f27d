"""A backward sums bf16 products into an fp32 buffer with addmm_."""

import sys

import torch


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        hidden, weight = ctx.saved_tensors
        left, right = dy.t(), hidden
        if "repaired" in sys.argv:
            left, right = left.to(torch.float32), right.to(torch.float32)
        total = torch.zeros(weight.shape, dtype=torch.float32)
        total.addmm_(left, right)
        return dy @ weight, total.to(weight.dtype)


hidden = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
Head.apply(hidden, weight).sum().backward()
