"""Faults that hand-written functions have had, one each. The line at fault ends in `# HERE`;
ampcheck must name it, or its function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from right_functions import GradientAtForwardDtype, RMSNorm, drawn, labels
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function


def mask_in_default_dtype(scores):
    mask = torch.full((scores.shape[-1], scores.shape[-1]), -1e4).triu(1)
    return torch.bmm(scores, mask.expand(scores.shape[0], -1, -1))  # HERE


def autocast_off_without_casts(x, w):
    with torch.autocast("cpu", enabled=False):
        return x @ w.t()  # HERE


class AddmmDespiteDecorators(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        logits = x @ w.t()
        out = torch.zeros_like(logits)
        return torch.addmm(b, x, w.t(), out=out)  # HERE

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, d.t() @ x, d.sum(0)


class GatesGradient(Function):
    """The kernel's output is saved in fp32; its product with the incoming gradient mixes dtypes."""

    @staticmethod
    def forward(ctx, x, gates):
        y = x.float() * 2
        ctx.save_for_backward(x, gates, y)
        return (y * gates[:, None].float()).to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        x, gates, y = ctx.saved_tensors
        dgates = torch.bmm(y[:, None], d[:, :, None]).flatten()  # HERE
        return (d * gates[:, None] * 2).to(x.dtype), dgates.to(gates.dtype)


class PenaltyScatter(Function):
    @staticmethod
    def forward(ctx, loss, logits):
        ctx.save_for_backward(loss, logits)
        return loss.clone()

    @staticmethod
    def backward(ctx, d):
        loss, logits = ctx.saved_tensors
        largest, where = logits.max(-1, keepdim=True)
        penalty = torch.zeros(logits.shape, dtype=loss.dtype)
        penalty.scatter_(-1, where, largest * 1e-4)  # HERE
        return d, penalty.to(logits.dtype)


class RecomputesOutsideAutocast(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.no_grad():
            return F.silu(x @ w.t())

    @staticmethod
    def backward(ctx, d):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = F.silu(x @ w.t())  # HERE
        return torch.autograd.grad(out, (x, w), d)


class NarrowsItsGradient(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return (d * w).bfloat16(), (d * x).to(w.dtype)  # HERE


class ReturnsHalf(Function):
    @staticmethod
    def forward(ctx, x):  # HERE
        ctx.save_for_backward(x)
        return x.half().sin()

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d.to(x.dtype) * x.cos()


class RoundsBeforeSubtracting(Function):
    @staticmethod
    def forward(ctx, z, y):
        p = z.float().softmax(-1).to(z.dtype)
        p[torch.arange(len(y)), y] -= 1  # HERE
        ctx.save_for_backward(p / len(y))
        return F.cross_entropy(z.float(), y)

    @staticmethod
    def backward(ctx, d):
        (p,) = ctx.saved_tensors
        return p * d.to(p.dtype), None


class SumsChunksInLowPrecision(GradientAtForwardDtype):
    """The weight's gradient is accumulated over chunks of eight rows, in the weight's dtype."""

    @staticmethod
    def backward(ctx, d):
        x, w = (t.to(d.dtype) for t in ctx.saved_tensors)
        dw = torch.zeros_like(w)
        for i in range(0, x.shape[0], 8):
            dw += d[i : i + 8].t() @ x[i : i + 8]  # HERE
        return d @ w, dw


class WritesIntoTheGradient(RMSNorm):
    @staticmethod
    def backward(ctx, d):  # HERE
        dx, dw, _ = RMSNorm.backward(ctx, d)
        return d.copy_(dx), dw, None


class ViewsTheGradient(GradientAtForwardDtype):
    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        bits = d.view(torch.uint8)  # HERE
        rows = bits.view(d.dtype)
        return (rows @ w.to(d.dtype)).to(x.dtype), (rows.t() @ x.to(d.dtype)).to(w.dtype)


class ScalesWhatItSaved(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.gradient = 2 * x.detach()
        return x.square().sum()

    @staticmethod
    def backward(ctx, d):  # HERE
        return ctx.gradient.mul_(d.to(ctx.gradient.dtype))


class OverwritesLogits(Function):
    @staticmethod
    def forward(ctx, z, y):  # HERE
        loss = F.cross_entropy(z.float(), y)
        p = z.float().softmax(-1)
        p[torch.arange(len(y)), y] -= 1
        z.detach().copy_(p / len(y))
        ctx.save_for_backward(z.detach())
        return loss

    @staticmethod
    def backward(ctx, d):
        (g,) = ctx.saved_tensors
        return g * d.to(g.dtype), None


class ForgetsTheWeight(GradientAtForwardDtype):
    """No gradient for the weight when the input is frozen."""

    @staticmethod
    def backward(ctx, d):  # HERE
        x, w = (t.to(d.dtype) for t in ctx.saved_tensors)
        if not ctx.needs_input_grad[0]:
            return None, None
        return d @ w, d.t() @ x


class DequantisesToBf16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-8, 8, (6, 8), dtype=torch.int8))

    def forward(self, x):
        return x @ (self.codes.to(torch.bfloat16) * 0.1).t()  # HERE


def index_put_of_another_dtype(x, w):
    h = x @ w.t()
    out = torch.zeros(h.shape, dtype=x.dtype)
    out[torch.arange(len(h))] = h  # HERE
    return out


@torch.library.custom_op("isotype_faulty::row_scale", mutates_args=())
def row_scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.float() * w.float()).to(x.dtype)


def row_scale_backward(ctx, d):  # HERE
    x, w = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None, None
    return (d.float() * w.float()).to(x.dtype), (d.float() * x.float()).sum_to_size(w.shape).to(
        w.dtype
    )


row_scale.register_autograd(
    row_scale_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


FAULTY = {
    "mask": (mask_in_default_dtype, (drawn(2, 4, 4),), "AC001"),
    "autocast off": (autocast_off_without_casts, (drawn(4, 8), drawn(6, 8)), "AC001"),
    "addmm": (AddmmDespiteDecorators, (drawn(4, 8), drawn(6, 8), drawn(6)), "AC001"),
    "dequantised": (DequantisesToBf16(), (drawn(4, 8, dtype=torch.bfloat16),), "AC001"),
    "index put": (index_put_of_another_dtype, (drawn(4, 8), drawn(6, 8)), "AC001"),
    "gates": (GatesGradient, (drawn(4, 8, dtype=torch.bfloat16), drawn(4)), "AC002"),
    "scatter": (
        PenaltyScatter,
        (drawn(1).detach().sum().requires_grad_(), drawn(6, 5, dtype=torch.bfloat16)),
        "AC002",
    ),
    "recompute": (
        RecomputesOutsideAutocast,
        (drawn(4, 8, dtype=torch.bfloat16), drawn(6, 8)),
        "AC002",
    ),
    "narrow gradient": (NarrowsItsGradient, (drawn(4, 8), drawn(4, 8, seed=1)), "AC003"),
    "half output": (ReturnsHalf, (drawn(4, 8),), "AC004"),
    "cancellation": (
        RoundsBeforeSubtracting,
        ((drawn(6, 5) * 0.1 + 9 * F.one_hot(labels, 5)).detach().bfloat16(), labels),
        "AC006",
    ),
    "chunks": (SumsChunksInLowPrecision, (drawn(16, 8), drawn(6, 8)), "AC007"),
    "gradient overwritten": (
        lambda x, w: WritesIntoTheGradient.apply(x, w, 1e-6),
        (drawn(4, 8), drawn(8)),
        "AC008",
    ),
    "gradient viewed": (ViewsTheGradient, (drawn(4, 8), drawn(6, 8)), "AC009"),
    "second backward": (ScalesWhatItSaved, (drawn(4, 8),), "AC010"),
    "logits overwritten": (OverwritesLogits, (drawn(6, 5), labels), "AC011"),
    "frozen input": (ForgetsTheWeight, (drawn(4, 8), drawn(6, 8)), "AC012"),
    "custom op, frozen input": (row_scale, (drawn(5, 6), drawn(6)), "AC012"),
}
