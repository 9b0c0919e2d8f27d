"""A function with a Triton kernel that the gate lets pass, and one that it stops."""

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_tanh(x_ptr, out_ptr, stride, n, scale, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
        scale = scale.to(tl.float32)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n).to(tl.float32) * scale
    y = 2 * tl.sigmoid(2 * x.to(tl.float32)) - 1
    tl.store(out_ptr + row * stride + cols, y, mask=cols < n)


def inputs(rows=4, columns=32):
    return (torch.randn(rows, columns),)


def reference(x):
    return torch.tanh(x * 0.7)


def launch(x, wide):
    rows, columns = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    scaled_tanh[(rows,)](x, out, x.stride(0), columns, 0.7, WIDE=wide, BLOCK=block)
    return out


class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = launch(x, True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, d):
        (out,) = ctx.saved_tensors
        return (0.7 * d.float() * (1 - out.float() ** 2)).to(d.dtype)


class Narrow(Right):
    @staticmethod
    def forward(ctx, x):
        out = launch(x, False)
        ctx.save_for_backward(out)
        return out
