"""Kernels whose offsets pass 2^31, or that a Python float makes fp64. Each has a right twin. The
faulty line carries `# fault`."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_scale(x_ptr, out_ptr, stride, n, scale, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
        scale = scale.to(tl.float32)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n).to(tl.float32)  # fault
    tl.store(out_ptr + row * stride + cols, x * scale, mask=cols < n)  # fault


@triton.jit
def advance(ptr, rows, stride):
    return ptr + rows * stride  # fault


@triton.jit
def strided_rows(x_ptr, out_ptr, n_rows, stride, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        if WIDE:
            row = row.to(tl.int64)
        x = tl.load(advance(x_ptr, row, stride) + cols, mask=cols < n)
        tl.store(advance(out_ptr, row, stride) + cols, x, mask=cols < n)


@triton.jit
def flat_copy(x_ptr, out_ptr, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)  # fault
    if pid * BLOCK >= n:
        return
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@triton.jit
def carried_offset(x_ptr, out_ptr, n_rows, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    if WIDE:
        offsets = offsets.to(tl.int64)
    for _ in range(n_rows):
        tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))
        offsets += stride  # fault


@triton.jit
def tile_copy(x_ptr, out_ptr, rows, columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The program ids of a tile come from a division, and masked rows lie behind the tensor."""
    tiles = tl.cdiv(columns, BLOCK)
    pid_row = tl.program_id(0) // tiles
    pid_column = tl.program_id(0) - pid_row * tiles
    i = pid_row * BLOCK + tl.arange(0, BLOCK)
    j = pid_column * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        i = i.to(tl.int64)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    x = tl.load(x_ptr + i[:, None] * columns + j[None, :], mask=mask)  # fault
    tl.store(out_ptr + i[:, None] * columns + j[None, :], x, mask=mask)  # fault


def copy_rows(kernel, x, wide):
    """Launches one of the kernels as a library would."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(columns))
    if kernel is row_scale:
        row_scale[(rows,)](x, out, x.stride(0), columns, 1.7, WIDE=wide, BLOCK=block)
    elif kernel is strided_rows:
        strided_rows[(132,)](x, out, rows, x.stride(0), columns, WIDE=wide, BLOCK=block)
    elif kernel is flat_copy:
        grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
        flat_copy[grid](x, out, x.numel(), WIDE=wide, BLOCK=block)
    elif kernel is carried_offset:
        carried_offset[(1,)](x, out, rows, x.stride(0), WIDE=wide, BLOCK=block)
    else:
        tiles = triton.cdiv(rows, 64) * triton.cdiv(columns, 64)
        tile_copy[(tiles,)](x, out, rows, columns, WIDE=wide, BLOCK=64)
    return out


KERNELS = [row_scale, strided_rows, flat_copy, carried_offset, tile_copy]
