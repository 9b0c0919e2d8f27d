"""Products that are computed in fp32 blocks where the CPU has no bf16 instructions. Each test makes
this choice itself, so that it tests the same code on every machine."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from isotype import optimize, restore
from isotype.lora import lora_linear
from isotype.ops import linear_cross_entropy
from tests.api import widened_products as products

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks that a test's operands fill several times."""
    for name, value in {"BLOCK_ELEMENTS": 128, "MIN_ROWS": 8, "MIN_COLUMNS": 4}.items():
        monkeypatch.setattr(products, name, value)


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(
        dtype
    )


def assert_rounded_once(value: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    spacing = torch.finfo(value.dtype).eps
    torch.testing.assert_close(
        value.double(), exact, rtol=0.5 * spacing * 1.01, atol=1e-6 * terms + 1e-7
    )


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_are_summed_in_fp32_and_rounded_once(dtype):
    with products.widen_dtypes({BF16, FP16}):
        for rows, inner, columns in product((0, 1, 5, 33), (1, 24), (1, 19)):
            left, weight = random(rows, inner, dtype=dtype), random(columns, inner, dtype=dtype)
            bias, dy = random(columns, dtype=dtype), random(rows, columns, dtype=dtype)
            extra, b = random(rows, 3, dtype=dtype), random(columns, 3, dtype=dtype)
            y = products.linear(left, weight, bias)
            exact = left.double() @ weight.double().t()
            branch = extra.double() @ b.double().t()
            assert y.dtype == dtype
            assert_rounded_once(y, exact + bias.double(), inner)
            adapted = products.matmul_with_branch(left, weight.t(), extra, b.t(), 0.7, bias)
            assert_rounded_once(adapted, exact + bias.double() + 0.7 * branch, inner)
            scaled = products.matmul(dy, weight, 0.3)
            assert_rounded_once(scaled, 0.3 * (dy.double() @ weight.double()), columns)
            gradient = products.matmul_fp32(dy.t(), left)
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(
                gradient.double(), dy.double().t() @ left.double(), rtol=1e-6, atol=1e-6 * rows
            )
            total = products.addmm_(y.clone(), extra, b.t(), alpha=2.0, beta=0.5)
            assert_rounded_once(total, 0.5 * y.double() + 2.0 * branch, inner)
            # the same numbers again, and out= of a part of a tensor
            out = torch.full((rows, columns + 2), torch.nan, dtype=dtype)
            products.addmm_(out[:, :columns], left, weight.t(), beta=0.0)
            assert torch.equal(out[:, :columns], products.linear(left, weight)) or rows <= 3
            assert out[:, columns:].isnan().all()


def test_memory_of_cast_blocks_is_bounded(monkeypatch):
    cast, sizes = torch.Tensor.float, []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return cast(tensor)

    monkeypatch.setattr(torch.Tensor, "float", record)
    with products.widen_dtypes({BF16}):
        products.matmul(random(256, 16), random(16, 300))
    assert len(sizes) > 100
    assert max(sizes) <= products.BLOCK_ELEMENTS


@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_layer_has_the_dtypes_and_gradients_of_pytorch(autocast):
    weight_dtype = torch.float32 if autocast else BF16
    results = []
    for dtypes in ((), (BF16,)):
        torch.manual_seed(0)
        layer = nn.Linear(24, 19).to(weight_dtype)
        x = random(3, 11, 24, dtype=weight_dtype).requires_grad_()
        with products.widen_dtypes(dtypes):
            with torch.autocast("cpu", dtype=BF16, enabled=autocast):
                y = products.differentiable_linear(x, layer.weight, layer.bias)
            y.backward(random(3, 11, 19))
            assert ("Widened" in str(y.grad_fn)) == bool(dtypes)
        results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    exact_layer = copy.deepcopy(layer).to(BF16).double()
    exact_x = x.detach().to(BF16).double().requires_grad_()
    exact_layer.zero_grad()
    exact_y = exact_layer(exact_x)
    exact_y.backward(random(3, 11, 19).double())
    exact = [exact_y.detach(), exact_x.grad, exact_layer.weight.grad, exact_layer.bias.grad]
    for plain, widened, value in zip(*results, exact, strict=True):
        assert widened.dtype == plain.dtype
        plain_error = (plain.double() - value).norm()
        assert (widened.double() - value).norm() <= 1.02 * plain_error + 1e-9


def test_second_derivatives_and_transforms_of_a_linear_layer():
    x, weight = random(8, 5).requires_grad_(), random(7, 5).requires_grad_()
    with products.widen_dtypes({BF16}):
        y = products.differentiable_linear(x, weight)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
        mapped = torch.func.vmap(lambda row: products.differentiable_linear(row, weight))(x)
    exact = 2 * (weight.double().t() @ weight.double()).sum(0).expand(8, 5)
    torch.testing.assert_close(second.double(), exact, rtol=2**-6, atol=0.1)
    torch.testing.assert_close(mapped, F.linear(x, weight), rtol=2**-7, atol=1e-2)


def test_lora_and_the_loss_are_as_exact_as_with_pytorchs_products():
    tensors = [random(33, 24), random(19, 24), random(4, 24).float(), random(19, 4).float()]
    head, labels = random(50, 19), torch.arange(33)

    def run(dtypes, wide=False):
        x, weight, a, b = (t.double() if wide else t.clone() for t in tensors)
        leaves = [t.requires_grad_() for t in (x, weight, a, b)]
        with products.widen_dtypes(dtypes), torch.autocast("cpu", dtype=BF16, enabled=not wide):
            y = lora_linear(x, weight, a, b, scale=0.5)
            loss = linear_cross_entropy(y, head.to(y.dtype), labels)
        loss.backward()
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    exact, plain, widened = run((), wide=True), run(()), run({BF16})
    for value, plain_result, widened_result in zip(exact, plain, widened, strict=True):
        assert widened_result.dtype == plain_result.dtype
        plain_error = (plain_result.double() - value).norm()
        assert (widened_result.double() - value).norm() <= 1.1 * plain_error
    for first, second in zip(widened, run({BF16}), strict=True):
        assert torch.equal(first, second)


def test_optimize_places_linear_layers_only_where_bf16_is_emulated():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(BF16)
    x = random(5, 8)
    plain = model(x)
    with products.widen_dtypes(()):
        assert "blocks of fp32" not in str(optimize(model))
        assert "forward" not in vars(model[0])
    with products.widen_dtypes({BF16}):
        assert "blocks of fp32" in str(optimize(model))
        y = model(x)
        assert "Widened" in str(y.grad_fn)
        torch.testing.assert_close(y, plain, rtol=2**-7, atol=1e-3)
        restore(model)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize(
    ("generation", "dtypes"),
    [("cpu-avx2", {BF16, FP16}), ("cpu-avx512", {BF16, FP16}), ("cpu-avx512-bf16", set()), ("cpu-amx", set())],
)  # fmt: skip
def test_the_processor_decides(generation, dtypes, monkeypatch):
    device = products.detect("cpu")
    monkeypatch.setattr(
        products, "detect", lambda _: type(device)(**{**vars(device), "generation": generation})
    )
    assert products.find_widened_dtypes() == dtypes
