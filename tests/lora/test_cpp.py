"""The kernels for products with a rank: each against fp64, at sizes that end within a register, a tile and a block."""

from __future__ import annotations

import pytest
import torch

from isotype.lora.products import add_product_, product_fp32, scaled_product, why_not_native

kernels = pytest.mark.skipif(bool(why_not_native()), reason=why_not_native() or "-")
# T tokens, N features, R ranks
SIZES_TNR = [(0, 8, 2), (1, 1, 1), (1, 64, 16), (7, 31, 3), (16, 33, 8), (33, 80, 17), (65, 48, 48), (64, 97, 49), (300, 512, 32)]


def operands(tokens: int, features: int, ranks: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + features)
    shapes = ((tokens, features), (ranks, features), (tokens, ranks))
    return tuple(torch.randn(shape, generator=g).bfloat16() for shape in shapes)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@kernels
@pytest.mark.parametrize(("tokens", "features", "ranks"), SIZES_TNR)
def test_every_product_is_its_exact_value_rounded_once(tokens, features, ranks):
    x, a, left = operands(tokens, features, ranks)
    # fp32 sums may fall on the other side of a rounding: half a spacing, and a little
    one_rounding = 0.5 * 2**-7 * 1.01
    exact = 0.5 * (x.double() @ a.double().t())
    for operand in (a, a.t().contiguous().t()):
        got = scaled_product(x, operand.t(), 0.5)
        torch.testing.assert_close(got.double(), exact, rtol=one_rounding, atol=1e-5 * features)
    exact = x.double() + 0.7 * (left.double() @ a.double())
    for operand in (a, a.t().contiguous().t()):
        y = x.clone()
        add_product_(y, left, operand, 0.7)
        torch.testing.assert_close(y.double(), exact, rtol=one_rounding, atol=1e-5 * ranks)
    exact = 0.3 * (left.double().t() @ x.double())
    assert error(product_fp32(left, x, 0.3), exact) <= 1e-6
    assert error(product_fp32(x, left, 0.3), exact.t()) <= 1e-6


@kernels
def test_a_sum_does_not_depend_on_the_number_of_threads():
    x, a, left = operands(256, 512, 16)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = x.clone()
            add_product_(y, left, a, 1.0)
            results.append((y, scaled_product(x, a.t()), product_fp32(left, x, 1.0), product_fp32(x, left, 1.0)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other))
