"""An autograd.Function whose backward multiplies a bf16 gradient by a saved fp32 factor."""

import sys

import torch


def keep(**options):
    return lambda function: function


custom_fwd, custom_bwd = keep, keep
if "repaired" in sys.argv:
    custom_fwd, custom_bwd = torch.amp.custom_fwd, torch.amp.custom_bwd


class FusedLora(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, a, b):
        ctx.save_for_backward(x, a, b)
        return (x @ a.t()) @ b.t()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, dy):
        x, a, b = ctx.saved_tensors
        inner = dy @ b
        return inner @ a, inner.t() @ x, dy.t() @ (x @ a.t())


x = torch.randn(3, 16, requires_grad=True)
a, b = torch.randn(4, 16, requires_grad=True), torch.randn(8, 4, requires_grad=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = FusedLora.apply(x, a, b).float().sum()
loss.backward()
