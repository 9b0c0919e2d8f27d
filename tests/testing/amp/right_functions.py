"""Right functions of every kind that a training program has: `ampcheck` must be silent about each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def drawn(
    *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return (
        (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale)
        .to(dtype)
        .requires_grad_()
    )


class RMSNorm(Function):
    """fp32 inside, one rounding at the end; the weight's gradient is summed in fp32."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x_fp32 = x.float()
        rstd = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x_fp32 * rstd * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        x, weight, rstd = ctx.saved_tensors
        d_fp32, x_hat = d.float(), x.float() * rstd
        wd = d_fp32 * weight.float()
        dx = rstd * (wd - x_hat * (wd * x_hat).mean(-1, keepdim=True))
        dw = (d_fp32 * x_hat).reshape(-1, x.shape[-1]).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class SiluMul(Function):
    """Saves only its inputs; gradients in their tensors' dtypes."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        gate, up = ctx.saved_tensors
        g, u, d_fp32 = gate.float(), up.float(), d.float()
        s = g.sigmoid()
        return (d_fp32 * u * s * (1 + g * (1 - s))).to(gate.dtype), (d_fp32 * g * s).to(up.dtype)


class CastInputsLinear(Function):
    """The decorators' own way: inputs cast to a fixed dtype under autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, d.flatten(0, -2).t() @ x.flatten(0, -2)


class DecidingLinear(Function):
    """Decides its compute dtype once, switches autocast off, casts everything it multiplies."""

    @staticmethod
    def forward(ctx, x, w, b):
        dtype = (
            torch.get_autocast_dtype("cpu")
            if torch.is_autocast_enabled("cpu")
            else torch.promote_types(x.dtype, w.dtype)
        )
        ctx.save_for_backward(x, w)
        ctx.bias_dtype = b.dtype
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.to(dtype), w.to(dtype), b.to(dtype))

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        dx = dw = db = None
        with torch.autocast("cpu", enabled=False):
            rows = d.reshape(-1, d.shape[-1])
            if ctx.needs_input_grad[0]:
                dx = (d @ w.to(d.dtype)).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = (rows.t() @ x.reshape(-1, x.shape[-1]).to(d.dtype)).to(w.dtype)
            if ctx.needs_input_grad[2]:
                db = rows.float().sum(0).to(ctx.bias_dtype)
        return dx, dw, db


class ChunkedCrossEntropy(Function):
    """Fused linear cross-entropy, four rows at a time; the head's gradient is accumulated in fp32."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, h, w, y):
        dw, dh, loss = torch.zeros(w.shape), torch.empty_like(h), torch.zeros(())
        with torch.autocast("cpu", enabled=False):
            for i in range(0, h.shape[0], 4):
                hc, yc = h[i : i + 4].float(), y[i : i + 4]
                z = hc @ w.float().t()
                loss += F.cross_entropy(z, yc, reduction="sum")
                p = z.softmax(-1)
                p[torch.arange(len(yc)), yc] -= 1.0
                dw += p.t() @ hc
                dh[i : i + 4] = (p @ w.float()).to(h.dtype)
        ctx.save_for_backward(dh, (dw / h.shape[0]).to(w.dtype))
        ctx.rows = h.shape[0]
        return loss / h.shape[0]

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, d):
        dh, dw = ctx.saved_tensors
        return dh * (d / ctx.rows), dw * d, None


class SeparateContext(Function):
    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return (d * w).to(x.dtype), (d * x).sum_to_size(w.shape).to(w.dtype)


class InPlaceScale(Function):
    """In place by intention, and says so."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, d):
        return d * 2


class GradientAtForwardDtype(Function):
    """One matrix product under autocast, gradients in the autocast dtype, as torch's own linear
    returns them.
    """

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w.to(d.dtype), d.t() @ x.to(d.dtype)


class Rotary(nn.Module):
    """A table kept in a buffer, positions in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))

    def forward(self, x):
        angle = torch.arange(x.shape[1]).float()[:, None] * self.frequency.float()
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        left, right = x[..., ::2], x[..., 1::2]
        return torch.stack([left * cos - right * sin, left * sin + right * cos], -1).flatten(-2)


class LlamaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


class Router(nn.Module):
    """Top-2 of 4 experts, weighted, added into a buffer by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weight, which = self.gate(x).float().softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (which == e).nonzero(as_tuple=True)
            out.index_add_(0, row, (expert(x[row]) * weight[row, slot, None]).to(out.dtype))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        return {"hidden": x + self.down(F.gelu(self.up(self.norm(x)))) * scale}


def refuses_mixed(x, w):
    if x.dtype != w.dtype:
        raise TypeError(f"x is {x.dtype} and w {w.dtype}")
    return RMSNorm.apply(x, w, 1e-6)


def autocast_off_inside(x, w):
    with torch.autocast("cpu", enabled=False):
        return (x.float() @ w.float().t()).to(x.dtype)


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def saves_its_output(x):
    return Sigmoid.apply(x)


class Sigmoid(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, d):
        (y,) = ctx.saved_tensors
        return d * y * (1 - y)


def with_captured_weight():
    held = drawn(6, 8, seed=9).detach()
    return lambda x: F.linear(x, held)


labels = torch.tensor([1, 0, 3, 2, 1, 4])


def rotate_half(x, cos, sin):
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


class RoutesInFp32(torch.nn.Module):
    """Its output is fp32 by a cast that is written down; a table is mixed in all the same."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4)

    def forward(self, x):
        return (self.gate(x).float() + torch.linspace(0, 1e-3, 4)).softmax(-1)


# the modules' weights are drawn here, and are the same whatever was imported before
_STATE = torch.get_rng_state()
torch.manual_seed(0)
RIGHT = {
    "router in fp32": (RoutesInFp32(), (drawn(4, 8),)),
    "rotate half in bf16": (
        rotate_half,
        tuple(drawn(4, 8, dtype=torch.bfloat16, seed=i) for i in range(3)),
    ),
    "linear": (F.linear, (drawn(4, 8), drawn(6, 8))),
    "silu": (F.silu, drawn(4, 8)),
    "cross entropy": (F.cross_entropy, (drawn(6, 5), labels)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (drawn(4, 8), drawn(8), drawn(8))),
    "softmax": (lambda x: x.softmax(-1), (drawn(4, 8, scale=4),)),
    "cumsum": (lambda x: x.cumsum(-1), (drawn(4, 8),)),
    "attention": (causal_attention, tuple(drawn(2, 2, 4, 8, seed=i) for i in range(3))),
    "embedding": (nn.Embedding(5, 8), (labels,)),
    "nn.BatchNorm1d": (nn.BatchNorm1d(8), (drawn(6, 8),)),
    "nn.Conv1d": (nn.Conv1d(8, 4, 3), (drawn(2, 8, 9),)),
    "nn.Dropout": (nn.Dropout(0.5), (drawn(4, 8),)),
    "nn.ReLU in place": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), (drawn(4, 8),)),
    "nn.MultiheadAttention": (
        nn.MultiheadAttention(8, 2),
        tuple(drawn(4, 2, 8, seed=i) for i in range(3)),
    ),
    "nn.GRU": (nn.GRU(8, 8), (drawn(4, 2, 8),)),
    "RMSNorm": (lambda x, w: RMSNorm.apply(x, w, 1e-6), (drawn(4, 8), drawn(8))),
    "RMSNorm in bf16": (
        lambda x, w: RMSNorm.apply(x, w, 1e-6),
        (drawn(4, 8, dtype=torch.bfloat16), drawn(8, dtype=torch.bfloat16)),
    ),
    "SiluMul": (SiluMul, (drawn(4, 8), drawn(4, 8, seed=1))),
    "CastInputsLinear": (CastInputsLinear, (drawn(4, 8), drawn(6, 8))),
    "DecidingLinear": (DecidingLinear, (drawn(4, 8), drawn(6, 8), drawn(6))),
    "ChunkedCrossEntropy": (ChunkedCrossEntropy, (drawn(6, 8), drawn(5, 8), labels)),
    "SeparateContext": (SeparateContext, (drawn(4, 8), drawn(8))),
    "InPlaceScale": (InPlaceScale, (drawn(4, 8),)),
    "GradientAtForwardDtype": (GradientAtForwardDtype, (drawn(4, 8), drawn(6, 8))),
    "Sigmoid": (saves_its_output, (drawn(4, 8),)),
    "Rotary": (Rotary(), (drawn(2, 5, 8),)),
    "LlamaNorm": (LlamaNorm(), (drawn(4, 8),)),
    "Router": (Router(), (drawn(6, 8),)),
    "Block": (Block(), {"x": drawn(4, 8), "scale": 0.5}),
    "Block.forward": (Block().forward, (drawn(4, 8),)),
    "refuses mixed": (refuses_mixed, (drawn(4, 8), drawn(8))),
    "autocast off inside": (autocast_off_inside, (drawn(4, 8), drawn(6, 8))),
    "captured weight": (with_captured_weight(), (drawn(4, 8),)),
}
torch.set_rng_state(_STATE)
