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


@triton.jit
def tanh_of_rows(x_ptr, out_ptr, rows, N: tl.constexpr):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        cols = row * N + tl.arange(0, N)
        x = tl.load(x_ptr + cols).to(tl.float32) * 0.7
        tl.store(out_ptr + cols, 2 * tl.sigmoid(2 * x) - 1)


class PerMultiprocessor(Right):
    """Launches one program for each multiprocessor, as LigerDyTFunction of liger-kernel 0.8.5."""

    @staticmethod
    def forward(ctx, x):
        if torch.cuda.is_available():
            programs = torch.cuda.get_device_properties(x.device).multi_processor_count
        out = torch.empty_like(x)
        tanh_of_rows[(programs,)](x, out, x.shape[0], x.shape[1])
        ctx.save_for_backward(out)
        return out
