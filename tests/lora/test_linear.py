"""The op itself: its contract, what it saves, and the ways in which fused ops elsewhere have written into others' tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from isotype.errors import DtypeError, ShapeError
from isotype.lora import lora_linear
from isotype.lora.linear import LoraLinear, decide

T, K, OUT, R = 20, 24, 16, 3


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (T, K), "weight": (OUT, K), "a": (R, K), "b": (OUT, R), "bias": (OUT,)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for name, shape in shapes.items()}


def plain(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias) + scale * (x @ a.t()) @ b.t()


def gradients(loss: Tensor, leaves: dict[str, Tensor], **options) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), **options)))


def test_gradients_agree_with_finite_differences():
    assert torch.autograd.gradcheck(lambda *args: lora_linear(*args, scale=0.7), tuple(tensors().values()))


@pytest.mark.parametrize("branch_fp32", [False, True])
def test_dropout_gradients_follow_the_mask(branch_fp32):
    leaves = tensors(torch.bfloat16 if branch_fp32 else torch.float64)

    def op(**inputs: Tensor) -> Tensor:
        torch.manual_seed(4)
        return lora_linear(**inputs, scale=0.7, dropout=0.4, branch_fp32=branch_fp32)

    torch.manual_seed(4)
    mask = torch.nn.functional.dropout(torch.ones(T, K, dtype=leaves["x"].dtype), 0.4)
    mask = (mask != 0).double() / 0.6
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    expected_y = (
        torch.nn.functional.linear(wide["x"], wide["weight"], wide["bias"]) + 0.7 * ((wide["x"] * mask) @ wide["a"].t()) @ wide["b"].t()
    )
    got_y = op(**leaves)
    tolerance = {"rtol": 2e-2, "atol": 2e-1} if branch_fp32 else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(got_y.double(), expected_y, **tolerance)
    weights = torch.arange(OUT).double() - 7
    expected = gradients((expected_y * weights).sum(), wide)
    for name, gradient in gradients((got_y * weights.to(got_y.dtype)).sum(), leaves).items():
        assert gradient.dtype == leaves[name].dtype
        assert (gradient.double() - expected[name]).norm() <= (1e-2 if branch_fp32 else 1e-9) * expected[name].norm(), name


def test_each_gradient_leaves_the_function_in_its_tensors_dtype():
    # autograd casts what a leaf gets, so .grad proves nothing: what the function returned is looked at
    returned = []
    inner = LoraLinear.backward

    class Watched(LoraLinear):
        @staticmethod
        def backward(ctx, dy):
            out = inner(ctx, dy)
            returned.append([g.dtype for g in out if g is not None])
            return out

    for x, weight, adapter, autocast in itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=4):
        leaves = tensors()
        kinds = {"x": x, "weight": weight, "bias": weight, "a": adapter, "b": adapter}
        leaves = {name: leaves[name].detach().to(kind).requires_grad_() for name, kind in kinds.items()}
        with torch.autocast("cpu", dtype=autocast, enabled=autocast != torch.float32):
            if autocast == torch.float32 and x != weight:
                continue
            dtypes = decide(leaves["x"], weight, adapter, quantised=False)
            y = Watched.apply(*leaves.values(), None, 1.0, None, dtypes)
        y.sum().backward()
        assert returned.pop() == list(kinds.values())


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


def test_autocast_does_not_reach_inside_and_backward_may_run_under_it():
    leaves = {name: t.detach().bfloat16().requires_grad_() for name, t in tensors().items()}
    leaves["a"], leaves["b"] = (leaves[name].detach().float().requires_grad_() for name in "ab")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside = lora_linear(**leaves).float().square().sum()
    first = gradients(outside, leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.float16):
        second = gradients(outside, leaves)
    for name in leaves:
        assert torch.equal(first[name], second[name])


@pytest.mark.parametrize(
    ("case", "branch_fp32", "trainable"),
    zip(("shared", "expanded", "retained", "second consumer", "view"), (False, True, True, False, False), (True, True, False, False, True)),
)
def test_writes_into_no_tensor_of_others(case, branch_fp32, trainable):
    dtype = torch.bfloat16 if branch_fp32 else torch.float64
    relative = 3e-2 if branch_fp32 else 1e-10
    leaves = tensors(dtype)
    leaves["weight"].requires_grad_(trainable)
    wide = {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in leaves.items()}

    def loss(op, t: dict[str, Tensor]) -> Tensor:
        x = t["x"] * 1.0
        if case == "view":
            x = x.view(T, 2, K // 2).transpose(0, 1).contiguous().transpose(0, 1).reshape(T, K)
        y = op(**t | {"x": x})
        if case == "shared":
            # one gradient tensor goes to both addends
            return (y + x[:, :OUT]).sum() * 2
        if case == "expanded":
            return y.sum()
        if case == "second consumer":
            return (y * y.detach()).sum() + y.sum() + x.sum()
        return y.square().sum()

    kinds = {name: t for name, t in leaves.items() if t.requires_grad}
    exact = gradients(loss(plain, wide), {name: wide[name] for name in kinds})
    before = {name: t.detach().clone() for name, t in leaves.items()}
    value = loss(lambda **t: lora_linear(**t, branch_fp32=branch_fp32), leaves)
    rounds = [gradients(value, kinds, retain_graph=True) for _ in range(2 if case == "retained" else 1)]
    for got in rounds:
        for name, gradient in got.items():
            assert (gradient.double() - exact[name]).norm() <= relative * exact[name].norm(), name
    for name, t in leaves.items():
        assert torch.equal(t, before[name]), name


def test_a_weight_changed_before_backward_is_an_error():
    leaves = tensors()
    y = lora_linear(**leaves)
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_refuses_with_the_fault_named():
    leaves = tensors(torch.float32)
    with pytest.raises(DtypeError, match=r"DT001 .* input in fp32 and a weight in bf16"):
        lora_linear(**leaves | {"weight": leaves["weight"].bfloat16()})
    with pytest.raises(ShapeError, match="SH001"):
        lora_linear(**leaves | {"b": leaves["b"].t()})


def test_wide_branch_is_nearer_to_fp64():
    leaves = tensors(torch.bfloat16)
    with torch.no_grad():
        leaves["a"].mul_(3)
        leaves["weight"].mul_(0.01)
    exact = plain(**{name: t.double() for name, t in leaves.items()})

    def distance(y: Tensor) -> Tensor:
        return (y.double() - exact).norm()

    assert distance(lora_linear(**leaves, branch_fp32=True)) < 0.9 * distance(lora_linear(**leaves))
