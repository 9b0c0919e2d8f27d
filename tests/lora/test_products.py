from __future__ import annotations

import pytest
import torch

from isotype.lora import products
from isotype.lora.products import gradient_product, product_fp32, row_blocks


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 1000])
def test_blocks_cover_every_row_once(rows, monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 256)
    covered = [i for block in row_blocks(rows, 16) for i in range(rows)[block]]
    assert covered == list(range(rows))


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_wide(dtype, small, monkeypatch):
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 512)
    monkeypatch.setattr(products, "SMALL_ELEMENTS", small)
    left, right = torch.randn(501, 7).to(dtype), torch.randn(501, 9).to(dtype)
    exact = left.double().t() @ right.double()
    got = product_fp32(left, right)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (got - exact).norm() <= (1e-5 if dtype == torch.bfloat16 else 1e-6) * exact.norm()
    if dtype in (torch.bfloat16, torch.float16):
        narrow = left.t() @ right
        assert (narrow - exact).norm() > 1e-4 * exact.norm()


def test_a_narrow_leaf_is_rounded_once():
    left, right = torch.randn(64, 3).bfloat16(), torch.randn(64, 5).bfloat16()
    exact = (left.double().t() @ right.double()) * 0.3
    assert torch.equal(gradient_product(left, right, 0.3, torch.bfloat16), exact.to(torch.float32).bfloat16())
