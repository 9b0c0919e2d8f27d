"""Functions that launch kernels, as users write them: for a GPU, choosing their path by device."""

import torch
import triton
import triton.language as tl

from . import fault_kernels


@triton.jit
def silu_mul_forward(gate, up, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g_fp32 = tl.load(gate + i, mask=i < n, other=0.0).to(tl.float32)
    u_fp32 = tl.load(up + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, (g_fp32 * tl.sigmoid(g_fp32) * u_fp32).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def exp_backward(gate, dy, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < n, other=0.0)
    tl.store(out + i, tl.load(dy + i, mask=i < n) * tl.exp(g), mask=i < n)


class GoodMul(torch.autograd.Function):
    backward_kernel = silu_mul_forward

    @staticmethod
    def forward(ctx, gate, up):
        if not gate.is_cuda:
            raise ValueError("needs a GPU")
        if gate.dtype != up.dtype:
            raise TypeError("gate and up differ")
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        with torch.cuda.device(gate.device):
            silu_mul_forward[(triton.cdiv(gate.numel(), 64),)](
                gate, up, out, gate.numel(), BLOCK=64
            )
        return out

    @staticmethod
    def backward(ctx, dy):
        gate, _ = ctx.saved_tensors
        out = torch.empty(gate.shape, device=dy.device, dtype=dy.dtype)
        assert dy.is_cuda
        assert not torch.isnan(out).any()
        silu_mul_forward[(1,)](gate, dy, out, gate.numel(), BLOCK=64)
        return out, out


class BadBackward(GoodMul):
    @staticmethod
    def backward(ctx, dy):
        gate, _ = ctx.saved_tensors
        out = torch.empty_like(gate)
        exp_backward[(1,)](gate, dy, out, gate.numel(), BLOCK=64)
        return out, out


def good_mul(gate, up):
    return GoodMul.apply(gate, up)


def bad_mul(gate, up):
    return BadBackward.apply(gate, up)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 64}, num_warps=2),
        triton.Config({"BLOCK": 128}, num_stages=3),
    ],
    key=["n"],
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned_copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) if EVEN else tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x, mask=i < n)


def copy(x):
    target = triton.runtime.driver.active.get_current_target()
    assert target.backend in ("cuda", "hip")
    out = torch.empty_like(x.cuda())
    tuned_copy[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out


def mixed_dot(a, b):
    out = torch.empty(32, 32, device=a.device)
    fault_kernels.low_dot[(1,)](a, b, out, N=32)
    return out


def on_the_cpu(x):
    return x * 2
