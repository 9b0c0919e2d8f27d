"""Kernels that fail for some dtype, and with FIXED do not. The faulty line carries `# fault`."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def loop_fp64_scalar(x_ptr, out_ptr, scale, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    if FIXED:
        scale = scale.to(tl.float32)
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i in range(n):
        value = tl.load(x_ptr + i * BLOCK + cols).to(tl.float32)
        m = tl.maximum(m, value * scale)  # fault
    tl.store(out_ptr + cols, m)


@triton.jit
def while_sum(x_ptr, out_ptr, n, FIXED: tl.constexpr):
    total = tl.zeros((), tl.float32) if FIXED else 0
    i = 0
    while i < n:
        total += tl.load(x_ptr + i)  # fault
        i += 1
    tl.store(out_ptr, total)


@triton.jit
def branch_else(x_ptr, out_ptr, causal, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    if FIXED:
        x = x.to(tl.float32)
    if causal:
        y = x
    else:
        y = x * tl.full((BLOCK,), 2.0, tl.float32)  # fault
    tl.store(out_ptr + cols, y, mask=cols < n)


@triton.jit
def _scaled(x, scale):
    if scale != 1.0:
        x = x.to(tl.float32) * scale  # fault
    return x


@triton.jit
def branch_in_helper(x_ptr, out_ptr, scale, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(out_ptr + cols, _scaled(x.to(tl.float32) if FIXED else x, scale))


@triton.jit
def dot_probabilities(q_ptr, k_ptr, v_ptr, out_ptr, FIXED: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    s = tl.dot(tl.load(q_ptr + at), tl.load(k_ptr + at))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    v = tl.load(v_ptr + at)
    if FIXED:
        p = p.to(v.dtype)
    tl.store(out_ptr + at, tl.dot(p, v))  # fault


@triton.jit
def log_of_mean(x_ptr, out_ptr, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    if FIXED:
        x = x.to(tl.float32)
    square = x * x
    tl.store(out_ptr + cols, tl.sqrt(square + 1), mask=cols < n)  # fault


@triton.jit
def tanh_low(x_ptr, out_ptr, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    if FIXED:
        x = x.to(tl.float32)
    tl.store(out_ptr + cols, libdevice.tanh(x))  # fault


@triton.jit
def low_sum_loop(x_ptr, out_ptr, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32 if FIXED else x_ptr.dtype.element_ty)
    for i in range(n):
        acc += tl.load(x_ptr + i * BLOCK + cols)  # fault
    tl.store(out_ptr + cols, acc)


@triton.jit
def low_block_sum(x_ptr, out_ptr, n, FIXED: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    if FIXED:
        x = x.to(tl.float32)
    tl.store(out_ptr, tl.sum(x, 0))  # fault


@triton.jit
def block_through_one_pointer(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out_ptr, x)


@triton.jit
def tanh_by_ptx(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """An instruction that sm_80 does not have and sm_90 has."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y = tl.inline_asm_elementwise(
        "tanh.approx.bf16x2 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )
    tl.store(out_ptr + i, y)


@triton.autotune(configs=[triton.Config({}, num_warps=1)], key=[])
@triton.jit
def three_rows_in_one_warp(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + n + i, mask=i < n, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + 2 * n + i, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sum(x * y * z, 0)
    tl.store(out_ptr + i, x * s + y, mask=i < n)
    tl.store(out_ptr + n + i, z * s, mask=i < n)


@triton.jit
def low_dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    c = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
    tl.store(out_ptr + at, c)
