"""The repaired interpreter against torch: bf16 rounding, arithmetic, reductions, float arguments,
libdevice.
"""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
# ruff: noqa: E402 - Triton is an extra
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh

from isotype.testing.interpreter import interpreted, narrow, widen


def test_fp64_is_rounded_to_bf16_once():
    # just above the midpoint of two bf16 numbers, by less than fp32 can hold: rounding twice would
    # go down
    value = 1.0 + 2.0**-8 + 2.0**-40
    assert widen(narrow(np.float64(value))) == np.float32(1.0 + 2.0**-7)
    # what rounding twice gives
    assert torch.tensor(value, dtype=torch.float64).float().bfloat16() == 1.0


@triton.jit
def arithmetic(x, y, out, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < n, other=0.0)
    b = tl.load(y + i, mask=i < n, other=1.0)
    if KIND == "add":
        r = a + b
    elif KIND == "sub":
        r = a - b
    elif KIND == "mul":
        r = a * b
    elif KIND == "div":
        r = (a / b).to(a.dtype)
    elif KIND == "neg":
        r = -a
    elif KIND == "abs":
        r = tl.abs(a)
    elif KIND == "max":
        r = tl.maximum(a, b)
    elif KIND == "min":
        r = tl.minimum(a, b)
    elif KIND == "where":
        r = tl.where(a > b, a, b * 0.5)
    elif KIND == "fma":
        r = tl.fma(a, b, a)
    elif KIND == "exp":
        r = tl.exp(a.to(tl.float32)).to(a.dtype)
    elif KIND == "scalar":
        r = a * 3.14159
    tl.store(out + i, r, mask=i < n)


EXPECTED = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: (a.float() / b.float()).to(a.dtype),
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "max": torch.maximum,
    "min": torch.minimum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "fma": lambda a, b: (a.double() * b.double() + a.double()).to(a.dtype),
    "exp": lambda a, b: a.float().exp().to(a.dtype),
    "scalar": lambda a, b: a * torch.tensor(3.14159, dtype=a.dtype),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_pytorchs_in_every_dtype(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, generator=generator).to(dtype) for _ in range(2))
    for kind, function in EXPECTED.items():
        out, expected = torch.empty_like(x), function(x, y)
        with interpreted():
            arithmetic[(2,)](x, y, out, 200, KIND=kind, BLOCK=128)
        if kind == "exp" or dtype == torch.float32:
            torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
        else:
            assert torch.equal(out, expected), kind


@triton.jit
def reductions(x, out, M: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, M)
    a = tl.load(x + row[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + row, tl.sum(a, axis=1))
    tl.store(out + M + row, tl.max(a, axis=1))
    tl.store(out + 2 * M + row, tl.min(a, axis=1))
    tl.store(out + 3 * M + row, tl.argmax(a, axis=1).to(out.dtype.element_ty))
    tl.store(out + 4 * M + row, a.sum(1))
    tl.store(out + 5 * M, tl.sum(a))


def halves(rows):
    while rows.shape[1] > 1:
        rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
    return rows[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reductions_round_as_a_tree_of_low_precision_additions_does(dtype):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.zeros(6 * 4, dtype=dtype)
    with interpreted():
        reductions[(1,)](x, out, 4, 32)
    sums, largest, smallest, where, members, total = out.view(6, 4)
    assert torch.equal(sums, halves(x))
    assert torch.equal(members, halves(x))
    assert torch.equal(largest, x.amax(1))
    assert torch.equal(smallest, x.amin(1))
    assert torch.equal(where, x.argmax(1).to(dtype))
    assert torch.equal(total[0], halves(x.reshape(1, -1))[0])


@triton.jit
def larger_magnitude(value, index, other_value, other_index):
    is_first = tl.abs(value) >= tl.abs(other_value)
    return tl.where(is_first, value, other_value), tl.where(is_first, index, other_index)


@triton.jit
def both(left, right):
    return left & right


@triton.jit
def nearer_to_one(left, right):
    result = right
    if tl.abs(left - 1) < tl.abs(right - 1):
        result = left
    return result


@triton.jit
def reduces_by_functions(x, values, indices, flags, ROWS: tl.constexpr, N: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, N)
    block = tl.load(x + row[:, None] * N + column[None, :])
    index = tl.broadcast_to(column[None, :], (ROWS, N))
    largest, where = tl.reduce((block, index), 1, larger_magnitude)
    tl.store(values + row, largest)
    tl.store(indices + row, where)
    tl.store(flags, tl.reduce(tl.abs(block) < 5, None, both).to(tl.int32))
    nearest = tl.reduce(block, 1, nearer_to_one, keep_dims=True)
    tl.store(values + ROWS + row[:, None], nearest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reductions_by_functions_of_the_kernel(dtype):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = torch.zeros(2, 4, dtype=dtype)
    indices = torch.zeros(4, dtype=torch.int32)
    flags = torch.zeros(1, dtype=torch.int32)
    with interpreted():
        reduces_by_functions[(1,)](x, values, indices, flags, 4, 32)
    assert torch.equal(indices, x.abs().argmax(1).int())
    assert torch.equal(values[0], x.gather(1, indices[:, None].long())[:, 0])
    assert torch.equal(flags[0], (x.abs() < 5).all().int())
    nearest = (x - 1).abs().argmin(1, keepdim=True)
    assert torch.equal(values[1], x.gather(1, nearest)[:, 0])


@triton.jit
def adds(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + i % 2, tl.load(x + i))


@triton.jit
def scans(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


def test_what_has_no_bf16_form_is_refused():
    for kernel in (adds, scans):
        with (
            interpreted(),
            pytest.raises(Exception, match="of bf16 has no CPU version: widen to fp32"),
        ):
            kernel[(1,)](torch.ones(16).bfloat16(), torch.zeros(16).bfloat16(), 16)


@triton.jit
def scaled_tanh(x, out, scale, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    wide = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, scale.to(tl.float32) * tanh(wide / scale) + libdevice.erf(wide), mask=i < n)


def test_float_arguments_and_libdevice():
    x, out = torch.randn(50), torch.empty(50)
    with interpreted():
        scaled_tanh[(1,)](x, out, 30.0, 50, BLOCK=64)
    torch.testing.assert_close(out, 30 * torch.tanh(x / 30) + torch.erf(x))
    assert tanh(0.5) is None  # the stub is a stub again


@triton.jit
def tanh_of_bf16(x, out):
    tl.store(out, tanh(tl.load(x)))


cast_value = tl.cast  # unsloth.kernels.utils has `triton_cast = tl.cast`


@triton.jit
def load_wide(x):
    return cast_value(tl.load(x), tl.float32)


@triton.jit
def double(x, out):
    tl.store(out, load_wide(x) * cast_value(2, tl.float32))


def test_functions_of_the_language_under_other_names():
    out = torch.zeros(1)
    with interpreted():
        double[(1,)](torch.full((1,), 1.5).bfloat16(), out)
    assert out.item() == 3.0
    assert cast_value is tl.cast


@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})],
    key=["n"],
    cache_results=True,
)
@triton.jit
def tuned_copy(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def test_autotuned_kernels_use_no_cache_on_disk(tmp_path, monkeypatch):
    """The cache of flash-linear-attention's kernels needs a GPU, and must not get times of a CPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.randn(20)
    out = torch.zeros_like(x)
    with interpreted():
        tuned_copy[(2,)](x, out, 20)
    assert torch.equal(out, x)
    assert list(tmp_path.iterdir()) == []


def test_libdevice_refuses_bf16_as_a_compiler_does():
    with interpreted(), pytest.raises(Exception, match="Expect fp32 or fp64, got bf16"):
        tanh_of_bf16[(1,)](torch.zeros(1).bfloat16(), torch.zeros(1))


@triton.jit
def fails(x):
    tl.store(x, tl.load(x) + undefined)  # noqa: F821


def test_everything_is_put_back_even_after_an_error():
    before = (
        triton.runtime.interpreter.InterpreterBuilder.create_fadd,
        triton.JITFunction.run,
        tl.load,
        tl.tensor.sum,
    )
    with interpreted(), interpreted():
        with pytest.raises(Exception, match="undefined"):
            fails[(1,)](torch.zeros(1))
    assert before == (
        triton.runtime.interpreter.InterpreterBuilder.create_fadd,
        triton.JITFunction.run,
        tl.load,
        tl.tensor.sum,
    )
