"""The op itself: its contract, what it saves, and the ways in which fused ops elsewhere have
written into others' tensors.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isotype.errors import DtypeError, ShapeError
from isotype.lora import lora_linear
from isotype.testing import ampcheck
from tests.api import (
    LORA_KERNELS,
    LORA_LINEAR,
    add_product_,
    can_run_few_rows,
    few_rows_product,
    kernels_unavailable_reason,
    lora_linear_reference,
    product_fp32,
    scaled_product,
)

T, K, OUT, R = 20, 24, 16, 3


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (T, K), "weight": (OUT, K), "a": (R, K), "b": (OUT, R), "bias": (OUT,)}
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def test_it_keeps_its_contract():
    # a contract has no words for "X is W where autocast is off": that refusal is all that is found
    arguments = {name: t.detach() for name, t in tensors(torch.float32).items() if name != "bias"}
    report = ampcheck(
        partial(lora_linear, scale=0.7),
        arguments,
        reference=partial(lora_linear_reference, scale=0.7),
        contract=LORA_LINEAR,
        raises=False,
    )
    assert {finding.code for finding in report.findings} == {"AC001"}
    assert all(
        "DT001" in finding.message and finding.observed.endswith("autocast off")
        for finding in report.findings
    )


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def test_gradients_agree_with_finite_differences():
    assert torch.autograd.gradcheck(
        lambda *args: lora_linear(*args, scale=0.7), tuple(tensors().values())
    )


def test_dropout_gradients_follow_the_mask():
    follows(branch_fp32=False)
    follows(branch_fp32=True)


def follows(*, branch_fp32):
    leaves = tensors(torch.bfloat16 if branch_fp32 else torch.float64)

    def op(**inputs: Tensor) -> Tensor:
        torch.manual_seed(4)
        return lora_linear(**inputs, scale=0.7, dropout=0.4, branch_fp32=branch_fp32)

    torch.manual_seed(4)
    mask = (F.dropout(torch.ones(T, K, dtype=leaves["x"].dtype), 0.4) != 0).double() / 0.6
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected_y = lora_linear_reference(**wide, scale=0.7, keep_mask=mask)
    got_y = op(**leaves)
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if branch_fp32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got_y.double(), expected_y, **tolerance)
    weights = torch.arange(OUT).double() - 7
    expected = gradients((expected_y * weights).sum(), wide)
    for name, gradient in gradients((got_y * weights.to(got_y.dtype)).sum(), leaves).items():
        assert gradient.dtype == leaves[name].dtype
        assert (gradient.double() - expected[name]).norm() <= (
            1e-2 if branch_fp32 else 1e-9
        ) * expected[name].norm(), name


def test_saves_tokens_x_rank_and_no_second_copy_of_x():
    leaves = tensors(torch.bfloat16)
    leaves["weight"].requires_grad_(False)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.append((tuple(t.shape), t.data_ptr())) or t, lambda t: t
    ):
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


# --- The kernels for products with a rank: each against fp64, at sizes that end within a register,
# a tile and a block.


kernels = pytest.mark.skipif(
    bool(kernels_unavailable_reason()), reason=kernels_unavailable_reason() or "-"
)
# T tokens, N features, R ranks
SIZES_TNR = [
    (0, 8, 2),
    (1, 1, 1),
    (1, 64, 16),
    (7, 31, 3),
    (16, 33, 8),
    (33, 80, 17),
    (65, 48, 48),
    (64, 97, 49),
    (300, 512, 32),
    # a gradient of several blocks of tokens and of columns
    (301, 1130, 200),
]


def operands(tokens: int, features: int, ranks: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + features)
    shapes = ((tokens, features), (ranks, features), (tokens, ranks))
    return tuple(torch.randn(shape, generator=g).bfloat16() for shape in shapes)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.skipif(not LORA_KERNELS.load(), reason="no C++ compiler")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16])
def test_a_product_of_few_rows_is_its_exact_value_rounded_once(rows, has_bias):
    for features, columns, ranks in [(64, 8, 16), (97, 13, 3), (31, 5, 0), (256, 33, 40)]:
        g = torch.Generator().manual_seed(rows + features)
        shapes = (rows, features), (columns, features), (columns,), (rows, ranks), (columns, ranks)
        x, weight, bias, xa, b = (torch.randn(s, generator=g).bfloat16() for s in shapes)
        exact = x.double() @ weight.double().t() + 0.7 * (xa.double() @ b.double().t())
        if has_bias:
            exact += bias.double()
        assert can_run_few_rows(x, weight, bias)
        y = few_rows_product(x, weight, bias if has_bias else None, xa, b, 0.7)
        torch.testing.assert_close(
            y.double(), exact, rtol=0.5 * 2**-7 * 1.01, atol=1e-5 * (features + ranks)
        )
        # a prompt's answer does not depend on the other prompts of its batch
        alone = few_rows_product(x[-1:], weight, bias if has_bias else None, xa[-1:], b, 0.7)
        assert torch.equal(alone[0], y[-1])


@kernels
def test_every_product_is_its_exact_value_rounded_once(subtests):
    for sizes in SIZES_TNR:
        with subtests.test(str(sizes)):
            rounded_once(*sizes)


def rounded_once(tokens, features, ranks):
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
