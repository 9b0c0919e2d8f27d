from __future__ import annotations

import pytest
import torch

from isotype.environment.planned import planned_for
from isotype.lora import products
from isotype.lora.linear import add_branch_fp32, branch_gradients_fp32
from isotype.lora.products import gradient_product, product_fp32, row_blocks
from tests.host_reads import NoHostReads


def test_a_planned_gpu_widens_a_layer_in_one_block():
    with planned_for("cuda"):
        assert len(list(row_blocks(4096, 4096 + 4096, torch.device("meta")))) == 1
        x, y = (torch.empty(4096, n, device="meta", dtype=torch.bfloat16) for n in (4096, 1024))
        a, b = torch.empty(16, 4096, device="meta"), torch.empty(1024, 16, device="meta")
        with NoHostReads() as mode:
            xa = add_branch_fp32(y, x, None, a, b, 2.0)
            branch_gradients_fp32(y, x, xa, None, a, b, 2.0, torch.empty_like(x), needs_a=True, needs_b=True)
    products = [name for name in mode.seen if "mm" in name]
    # forward x A^T and its product with B; backward dB, dxa, dA and the input's share: each once
    assert len(products) == 6, products
    assert len(list(row_blocks(4096, 4096 + 4096, torch.device("cpu")))) == 128


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
