"""A hand-written LoRA projection: the saved tensors are fp32, and under autocast the incoming gradient is bf16."""

import torch


class LoraProj(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, A, B, scale):
        ctx.save_for_backward(x, weight, A, B)
        ctx.scale = scale
        return x @ weight.t() + scale * ((x @ A.t()) @ B.t())

    @staticmethod
    def backward(ctx, d_out):
        x, weight, A, B = ctx.saved_tensors
        s = ctx.scale
        x2, d2 = x.flatten(0, -2), d_out.flatten(0, -2)
        dB = s * (d2.t() @ (x2 @ A.t()))
        dA = s * ((d2 @ B).t() @ x2)
        dx = d2 @ weight + s * ((d2 @ B) @ A)
        return dx.view_as(x), None, dA, dB, None


def build():
    torch.manual_seed(0)
    x, weight, A, B = (torch.randn(*shape) * 0.1 for shape in ((2, 5, 16), (32, 16), (4, 16), (32, 4)))
    return LoraProj.apply, (x.requires_grad_(), weight, A.requires_grad_(), B.requires_grad_(), 2.0)
