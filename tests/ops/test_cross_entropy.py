"""cross_entropy: every option against fp64, every dtype combination, and the ways in which fused losses have failed before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import DtypeError, IsotypeError, ShapeError, UsageError
from isotype.ops import cross_entropy
from isotype.ops.backend import using
from isotype.ops.cross_entropy import eager
from isotype.ops.cross_entropy.op import cross_entropy_reference
from tests.ops.trials import FACTOR, error

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "scale": {"logit_scale": 0.25},
    "softcap": {"softcap": 5.0},
    "z_loss": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2},
}


def make(tokens=12, classes=50, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    logits = (torch.randn(tokens, classes, dtype=torch.float64) * 3).to(dtype)
    targets = torch.randint(0, classes, (tokens,))
    if tokens > 3:
        targets[[1, 3]] = -100
    return logits, targets


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.1), ("sum", 0.0), ("none", 0.1)])
def test_reference_is_torchs_own(reduction, smoothing):
    logits, targets = make()
    want = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=smoothing)
    torch.testing.assert_close(cross_entropy_reference(logits, targets, reduction=reduction, label_smoothing=smoothing), want)


@pytest.mark.parametrize(("options", "reduction"), zip(OPTIONS.values(), ["mean", "none"] * 3), ids=OPTIONS)
def test_gradients_agree_with_finite_differences(options, reduction):
    logits, targets = make(5, 7)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, targets[:5], reduction=reduction, **options), (logits.requires_grad_(),), fast_mode=False
    )


@pytest.mark.parametrize("path", ["cpp", "eager"])
@pytest.mark.parametrize("shape", [(12, 50), (3, 70001)], ids=str)
def test_every_option_is_as_near_to_fp64_as_the_reference(path, shape):
    logits, targets = make(*shape)
    options = {**OPTIONS["all"], "num_items": 7}
    results = []
    for op, dtype in ((cross_entropy, torch.bfloat16), (cross_entropy_reference, torch.bfloat16), (cross_entropy_reference, torch.float64)):
        x = logits.bfloat16().to(dtype).requires_grad_()
        with using(path):
            loss = op(x, targets, **options)
            (loss * 3).backward()
        results.append((loss, x.grad))
    for mine, plain, exact in zip(*results):
        assert error(mine, exact) <= FACTOR * error(plain, exact) + 1e-6


def test_no_fp32_copy_of_the_logits():
    logits = torch.zeros(64, 65536, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.dtype == torch.float32)
            return out

    with Sizes():
        # the dispatch mode sees inside the library op only when its body is called directly
        _, lse = eager.cross_entropy_forward(logits.detach(), targets, eager.LossRule())
        eager.cross_entropy_backward(logits.detach(), targets, lse, torch.ones(64), eager.LossRule(), torch.empty_like(logits), 65536)
    assert max(seen) <= logits.numel() / 8


# --- aliasing


def test_logits_that_others_read_too_are_never_written_and_a_second_backward_agrees():
    logits, targets = make(dtype=torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    loss = cross_entropy(x, targets) + x.square().sum()
    before = x.detach().clone()
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    loss.backward()
    assert torch.equal(x.detach(), before)
    torch.testing.assert_close(leaf.grad, 2 * first)
    (F.cross_entropy((other := logits.float().requires_grad_()), targets) + other.square().sum()).backward()
    assert error(first, other.grad) < 1e-2


def test_non_contiguous_and_leading_dimensions():
    base, targets = make(12, 50, dtype=torch.bfloat16)
    for view in (base.t().contiguous().t(), base.view(3, 4, 50), base.view(3, 4, 50).transpose(0, 1), base.repeat(1, 2)[:, ::2]):
        labels = targets.view(view.shape[:-1]) if view.dim() == 2 else targets.view(3, 4) if view.shape[0] == 3 else targets.view(3, 4).t()
        mine, theirs = view.detach().requires_grad_(), view.detach().clone().contiguous().requires_grad_()
        got = cross_entropy(mine, labels, reduction="none")
        want = cross_entropy(theirs, labels.contiguous(), reduction="none")
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_all_rows_ignored_is_nan_as_torchs_and_has_zero_gradient():
    x = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(x, torch.full((3,), -100))
    assert loss.isnan()
    loss.backward()
    assert torch.equal(x.grad, torch.zeros(3, 5))
    loss = cross_entropy(x, torch.full((3,), -100), num_items=4)
    loss.backward()
    assert loss == 0
    assert torch.equal(x.grad, torch.zeros(3, 5))


def test_ignored_rows_do_not_leak_their_nan():
    x = torch.randn(4, 5)
    x[2] = float("nan")
    x.requires_grad_()
    loss = cross_entropy(x, torch.tensor([0, 1, -100, 3]))
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


def test_masked_vocabulary_of_minus_inf():
    logits, targets = make(classes=9)
    logits[:, 7] = -torch.inf
    targets = targets.clamp(max=6)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(mine, targets).backward()
    F.cross_entropy(theirs, targets).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


# --- bad input


def test_out_of_range_targets_raise():
    with pytest.raises(IsotypeError, match=r"SH002 1 targets are out of range, the first is 5: expected 0\.\.4"):
        cross_entropy(torch.randn(2, 5), torch.tensor([0, 5]))
    with pytest.raises(IsotypeError, match="SH002"):
        cross_entropy(torch.randn(2, 5), torch.tensor([0, -1]))


def test_bad_arguments_raise_errors_with_their_codes():
    x, t = torch.randn(2, 5), torch.tensor([0, 1])
    with pytest.raises(DtypeError, match="DT001"):
        cross_entropy(x, t.float())
    with pytest.raises(ShapeError, match="SH001"):
        cross_entropy(x, t[:1])
    with pytest.raises(UsageError, match="reduction"):
        cross_entropy(x, t, reduction="average")
    with pytest.raises(UsageError, match="num_items=3 has no effect"):
        cross_entropy(x, t, reduction="sum", num_items=3)
    with pytest.raises(UsageError, match="label_smoothing"):
        cross_entropy(x, t, label_smoothing=2.0)


# --- transforms


def test_a_second_derivative_is_refused():
    logits, targets = make()
    loss = cross_entropy(logits.requires_grad_(), targets)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("cast", [pytest.param(None, marks=pytest.mark.full), torch.bfloat16], ids=["off", "bf16"])
def test_compiles_without_a_graph_break(cast):
    torch._dynamo.reset()
    logits, targets = make(dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, t: cross_entropy(x * 2, t, softcap=9.0), fullgraph=True, backend="aot_eager")
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        got = compiled(mine, targets)
        want = cross_entropy(theirs * 2, targets, softcap=9.0)
    got.backward()
    want.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine.grad, theirs.grad)
