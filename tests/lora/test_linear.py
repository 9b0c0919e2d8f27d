"""The op itself: its contract, what it saves, and the ways in which fused ops elsewhere have written into others' tensors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isotype.errors import DtypeError, ShapeError
from isotype.lora import lora_linear
from isotype.lora.linear import LORA_LINEAR
from isotype.testing import ampcheck

T, K, OUT, R = 20, 24, 16, 3


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (T, K), "weight": (OUT, K), "a": (R, K), "b": (OUT, R), "bias": (OUT,)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def plain(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + 0.7 * F.linear(F.linear(x, a), b)


@pytest.mark.parametrize("branch_fp32", [False, True])
def test_ampcheck_finds_nothing_under_any_dtype_combination(branch_fp32):
    x, *params = (t.detach() for name, t in tensors(torch.float32).items() if name != "bias")
    report = ampcheck(partial(lora_linear, scale=0.7, branch_fp32=branch_fp32), (x,), params=params, reference=plain)
    assert report.tried >= 50
    assert len(report.refused) == 6
    assert all("autocast off" in where and "DT001" in why for where, why in report.refused)


def test_it_keeps_its_contract():
    # a contract has no words for "X is W where autocast is off": that refusal is all that is found
    arguments = {name: t.detach() for name, t in tensors(torch.float32).items() if name != "bias"}
    report = ampcheck(partial(lora_linear, scale=0.7), arguments, reference=plain, contract=LORA_LINEAR, raises=False)
    assert {finding.code for finding in report.findings} == {"AC001"}
    assert all("DT001" in finding.message and finding.observed.endswith("autocast off") for finding in report.findings)


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))


def test_gradients_agree_with_finite_differences():
    assert torch.autograd.gradcheck(lambda *args: lora_linear(*args, scale=0.7), tuple(tensors().values()))


@pytest.mark.parametrize("branch_fp32", [False, True])
def test_dropout_gradients_follow_the_mask(branch_fp32):
    leaves = tensors(torch.bfloat16 if branch_fp32 else torch.float64)

    def op(**inputs: Tensor) -> Tensor:
        torch.manual_seed(4)
        return lora_linear(**inputs, scale=0.7, dropout=0.4, branch_fp32=branch_fp32)

    torch.manual_seed(4)
    mask = (F.dropout(torch.ones(T, K, dtype=leaves["x"].dtype), 0.4) != 0).double() / 0.6
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected_y = F.linear(wide["x"], wide["weight"], wide["bias"]) + 0.7 * ((wide["x"] * mask) @ wide["a"].t()) @ wide["b"].t()
    got_y = op(**leaves)
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if branch_fp32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got_y.double(), expected_y, **tolerance)
    weights = torch.arange(OUT).double() - 7
    expected = gradients((expected_y * weights).sum(), wide)
    for name, gradient in gradients((got_y * weights.to(got_y.dtype)).sum(), leaves).items():
        assert gradient.dtype == leaves[name].dtype
        assert (gradient.double() - expected[name]).norm() <= (1e-2 if branch_fp32 else 1e-9) * expected[name].norm(), name


def test_saves_tokens_x_rank_and_no_second_copy_of_x():
    leaves = tensors(torch.bfloat16)
    leaves["weight"].requires_grad_(False)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append((tuple(t.shape), t.data_ptr())) or t, lambda t: t):
        lora_linear(**leaves)
    saved = dict.fromkeys(shape for shape, _ in shapes)
    assert set(saved) == {(T, K), (OUT, K), (R, K), (OUT, R), (T, R)}
    assert len(shapes) == 5
    assert leaves["x"].data_ptr() in [pointer for _, pointer in shapes]


def test_refuses_with_the_fault_named():
    leaves = tensors(torch.float32)
    with pytest.raises(DtypeError, match=r"DT001 .* input in fp32 and a weight in bf16"):
        lora_linear(**leaves | {"weight": leaves["weight"].bfloat16()})
    with pytest.raises(ShapeError, match="SH001"):
        lora_linear(**leaves | {"b": leaves["b"].t()})
