"""Convolutions, batched products and attention in fp32 where the CPU has no bf16 instructions. Each
test makes this choice itself, so that it tests the same code on every machine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from isotype import optimize, restore
from isotype.training.memory.plan import LiveBytes
from tests.api import WidenedCalls, place_widened, widened_scratch_estimators
from tests.api import widened_products as products

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Blocks of one sample, so that every test computes several of them."""
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape)))


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function).removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def run(function, tensors, dtype, *, autocast=False):
    """Returns the result and the gradients of all floats, and the operators that ran."""
    leaves = []
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor = tensor.to(dtype).clone().requires_grad_()
        leaves.append(tensor)
    with Operators() as operators:
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            y = function(*leaves)
        y.backward(random(*y.shape, seed=9).to(BF16).to(y.dtype))
    return [
        y.detach(),
        *(leaf.grad for leaf in leaves if leaf.is_floating_point()),
    ], operators.names


def assert_as_exact_as_pytorch(function, tensors, operator, *, autocast=False, slack=1.02):
    """The results have PyTorch's dtypes, and no larger error against fp64. `operator` ran."""
    tensors = [t.to(BF16).float() if t.is_floating_point() else t for t in tensors]
    leaf_dtype = torch.float32 if autocast else BF16
    exact, _ = run(function, tensors, torch.float64)
    with products.widen_dtypes(()):
        plain, names = run(function, tensors, leaf_dtype, autocast=autocast)
        assert not any(name.startswith("isotype.widened") for name in names)
    with products.widen_dtypes({BF16}):
        widened, names = run(function, tensors, leaf_dtype, autocast=autocast)
    assert f"isotype.{operator}" in names
    for value, plain_result, result in zip(exact, plain, widened, strict=True):
        assert result.dtype == plain_result.dtype
        assert result.shape == value.shape
        plain_error = (plain_result.double() - value).norm()
        assert (result.double() - value).norm() <= slack * plain_error + 1e-9


CONVOLUTIONS = {
    "pictures": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
    "patches": lambda: nn.Conv2d(4, 6, 4, stride=4),
    "groups": lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "same size": lambda: nn.Conv2d(4, 6, 4, padding="same"),
    "clips": lambda: nn.Conv3d(2, 4, (1, 3, 3), padding=(0, 1, 1)),
    "depthwise": lambda: nn.Conv1d(8, 8, 4, padding=3, groups=8),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_as_exact_as_pytorchs(name):
    layer = CONVOLUTIONS[name]()
    place_widened(layer)
    assert "_conv_forward" not in vars(layer) or products.emulated_dtypes()
    with products.widen_dtypes({BF16}):
        place_widened(layer)
    channels = layer.in_channels
    x = random(3, channels, *[12] * len(layer.kernel_size))
    tensors = [x, layer.weight.detach()]
    if layer.bias is not None:
        tensors.append(layer.bias.detach())

    def convolve(x, weight, bias=None):
        return layer._conv_forward(x, weight, bias)

    for autocast in (False, True):
        assert_as_exact_as_pytorch(convolve, tensors, "widened_convolution", autocast=autocast)


def test_frozen_convolutions_and_second_derivatives():
    layer = nn.Conv2d(3, 4, 3, padding=1).to(BF16).requires_grad_(False)
    x = random(2, 3, 8, 8).to(BF16).requires_grad_()
    plain = layer(x)
    with products.widen_dtypes({BF16}):
        place_widened(layer)
        y = layer(x)
        assert torch.equal(y, layer(x.detach()))
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
    torch.testing.assert_close(y, plain, rtol=2**-7, atol=1e-2)
    assert second.isfinite().all()
    assert second.abs().sum() > 0


def attend(query, key, value, mask=None, **options):
    with WidenedCalls():
        return F.scaled_dot_product_attention(query, key, value, mask, **options)


def test_attention_that_the_kernels_do_not_support():
    queries, keys, values = random(2, 4, 9, 20), random(2, 4, 13, 20, seed=1), random(2, 4, 13, 20)
    operator = "widened_attention"
    assert_as_exact_as_pytorch(attend, [queries, keys, values], operator)
    assert_as_exact_as_pytorch(attend, [queries, keys, values], operator, autocast=True)
    square = [queries, keys[:, :, :9], values[:, :, :9]]
    assert_as_exact_as_pytorch(lambda *x: attend(*x, is_causal=True, scale=0.3), square, operator)
    mask = random(2, 1, 9, 13) > -0.5
    assert_as_exact_as_pytorch(lambda *x: attend(*x[:3], mask), [queries, keys, values], operator)
    bias = random(1, 4, 9, 13)
    float_bias = lambda *x: attend(*x, bias.to(x[0].dtype))  # noqa: E731
    assert_as_exact_as_pytorch(float_bias, [queries, keys, values], operator)
    # two query heads share a key head
    shared = [queries, keys[:, :2], values[:, :2]]
    assert_as_exact_as_pytorch(lambda *x: attend(*x, enable_gqa=True), shared, operator)
    assert_as_exact_as_pytorch(lambda *x: attention_op(*x), shared, operator)


def attention_op(query, key, value):
    from isotype.ops import attention

    return attention(query, key, value)


def test_products_in_the_code_of_a_model():
    left, right = random(2, 3, 7, 8), random(2, 3, 8, 5, seed=1)
    calls = {
        torch.matmul: [left, right],
        (lambda x, y: x @ y): [left, right[:1, :1]],
        (lambda x, y: x.matmul(y.transpose(-1, -2))): [left, random(3, 5, 8)],
        torch.bmm: [left[0], right[0]],
        (lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5, alpha=0.3)): [
            random(3, 1, 5),
            left[0],
            right[0],
        ],
    }
    for function, tensors in calls.items():

        def call(*tensors, function=function):
            with WidenedCalls():
                return function(*tensors)

        for autocast in (False, True):
            assert_as_exact_as_pytorch(call, tensors, "widened_bmm", autocast=autocast, slack=1.05)
    with products.widen_dtypes({BF16}), WidenedCalls():
        matrix = random(8, 5).to(BF16)
        assert torch.equal(left.to(BF16) @ matrix, products.linear(left.to(BF16), matrix.t()))
        with pytest.raises(RuntimeError, match="size"):
            left.to(BF16) @ random(2, 3, 9, 5).to(BF16)
        with pytest.raises(RuntimeError, match="expected"):
            left.to(BF16) @ right


class PaddedConvolution(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class PictureAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = PaddedConvolution(3, 8, 4, stride=4)
        self.attention = SelfAttention()

    def forward(self, x):
        return self.attention(self.patches(x).flatten(2).transpose(1, 2))


def test_optimize_places_convolutions_and_attention():
    model = PictureAttention().to(BF16)
    x = random(2, 3, 14, 14).to(BF16)
    plain = model(x)
    with products.widen_dtypes({BF16}):
        assert "blocks of fp32" in str(optimize(model))
        assert "forward" not in vars(model)
        with Operators() as operators:
            model(x).sum().backward()
        expected = ("convolution", "convolution_backward", "bmm", "product")
        assert {f"isotype.widened_{name}" for name in expected} <= operators.names
        assert not {"aten.bmm", "aten.mm", "aten.convolution"} & operators.names
        torch.testing.assert_close(copy.deepcopy(model)(x), plain, rtol=2**-6, atol=1e-2)
        restore(model)
    for module in model.modules():
        assert not {"forward", "_conv_forward"} & vars(module).keys()


def test_layers_of_gpt2_and_eager_attention_use_products_in_fp32():
    from tests.models import tiny

    model = tiny("gpt2").to(BF16)
    ids = torch.arange(24).view(2, 12)
    with products.widen_dtypes({BF16}):
        model.set_attn_implementation("eager")
        optimize(model)
        with Operators() as operators:
            model(ids, labels=ids).loss.backward()
        assert not {"aten.addmm", "aten.bmm", "aten.mm"} & operators.names
        llama = tiny("llama").to(BF16)
        llama.set_attn_implementation("eager")
        optimize(llama)
        with Operators() as operators:
            llama(ids, labels=ids).loss.backward()
        assert "aten.bmm" not in operators.names
        assert "isotype.widened_bmm" in operators.names


def test_operators_on_tensors_without_values():
    query = random(2, 4, 9, 20).to(BF16)
    ops = torch.ops.isotype
    x, weight = random(3, 4, 12, 12).to(BF16), random(6, 2, 3, 3).to(BF16)
    settings = [2, 2], [1, 1], [1, 1], 2
    dy = random(3, 6, 6, 6).to(BF16)
    calls = [
        (ops.widened_convolution, [x, weight, None, *settings]),
        (ops.widened_convolution_backward, [dy, x, weight, *settings, [True, True, True]]),
        (ops.widened_bmm, [query[0], query[0].transpose(1, 2), None, 0.5, 0.0]),
        (ops.widened_attention, [query, query, query, None, True, 0.1]),
    ]
    for op, arguments in calls:
        real = op(*arguments)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = op(*arguments)
        for first, second in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (real, fake)), strict=True
        ):
            assert (first.shape, first.dtype) == (second.shape, second.dtype)


def test_plans_count_the_fp32_blocks_of_the_operators(monkeypatch):
    """Each operator runs in a mode that counts tensors, and its blocks are as large as planned."""
    monkeypatch.setattr(products, "BLOCK_ELEMENTS", 4096)
    monkeypatch.setattr(products, "MIN_ROWS", 16)
    ops = torch.ops.isotype
    x, weight = random(4, 8, 16, 16).to(BF16), random(8, 8, 3, 3).to(BF16)
    settings = [1, 1], [1, 1], [1, 1], 1
    matrix, heads = random(200, 64).to(BF16), random(2, 4, 64, 20).to(BF16)
    out, logsumexp = ops.widened_attention(heads, heads, heads, None, False, 0.1)
    calls = [
        (ops.widened_product, [matrix, matrix.t(), None, matrix, matrix.t(), 1.0, 1.0, False]),
        (ops.add_widened_product, [random(200, 200).to(BF16), matrix, matrix.t(), 1.0, 0.0]),
        (ops.widened_convolution, [x, weight, None, *settings]),
        (ops.widened_convolution_backward, [x, x, weight, *settings, [True, False, False]]),
        (ops.widened_bmm, [heads[0], heads[0].transpose(1, 2), None, 1.0, 0.0]),
        (ops.widened_attention, [heads, heads, heads, None, False, 0.1]),
        (
            ops.widened_attention_backward,
            [heads, heads, heads, heads, out, logsumexp, None, False, 0.1],
        ),
    ]
    estimators = widened_scratch_estimators()
    for op, arguments in calls:
        live = LiveBytes(ignored=[t for t in arguments if isinstance(t, torch.Tensor)])
        with live:
            results = op.default.__wrapped__(*arguments)
        if isinstance(results, torch.Tensor):
            results = (results,)
        kept = sum(result.nbytes for result in results or ())
        planned = estimators[op.default](*arguments)
        assert 0.7 * planned <= live.peak - kept <= 1.15 * planned, op
    assert len(estimators) == len(calls)
