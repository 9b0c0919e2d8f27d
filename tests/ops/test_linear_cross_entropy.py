"""linear_cross_entropy: both gradient paths against fp64 and plain PyTorch, and the defects that shipped in other fused heads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import IsotypeError, ShapeError, UsageError
from isotype.ops import linear_cross_entropy
from isotype.ops.cross_entropy.rule import LossRule
from isotype.ops.linear_cross_entropy import op
from isotype.ops.linear_cross_entropy.op import linear_cross_entropy_reference
from tests.ops.trials import FACTOR, error

OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2},
}


def make(tokens=20, hidden=8, classes=50, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=torch.float64)
    w = torch.randn(classes, hidden, dtype=torch.float64) / hidden**0.5
    b = torch.randn(classes, dtype=torch.float64)
    targets = torch.randint(0, classes, (tokens,))
    targets[::7] = -100
    return x.to(dtype), w.to(dtype), b.to(dtype), targets


@pytest.mark.parametrize(("options", "reduction"), zip(OPTIONS.values(), ["none", "mean"]), ids=OPTIONS)
def test_gradients_agree_with_finite_differences(options, reduction):
    x, w, b, targets = make(6, 3, 7)
    assert torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy(x, w, targets, bias=b, reduction=reduction, chunk=2, **options),
        tuple(t.requires_grad_() for t in (x, w, b)),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunked_head_gradient_in_bf16_is_as_good_as_one_product(reduction):
    x, w, b, targets = make(512, 64, 300)
    leaves = [t.bfloat16().requires_grad_() for t in (x, w, b)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    peer = [t.detach().clone().requires_grad_() for t in leaves]
    linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], chunk=32, reduction=reduction).sum().backward()
    linear_cross_entropy_reference(exact[0], exact[1], targets, bias=exact[2], reduction=reduction).sum().backward()
    F.cross_entropy(F.linear(*peer).float(), targets, reduction=reduction).sum().backward()
    for mine, theirs, truth in zip(leaves, peer, exact):
        assert error(mine.grad, truth.grad) <= FACTOR * error(theirs.grad, truth.grad)


@pytest.mark.parametrize("num_items", [None, 300, torch.tensor(300), "divided outside"], ids=str)
def test_the_mean_rounds_no_gradient_a_second_time(num_items):
    """Dividing a gradient that is already bf16 rounded it once more: 2.3e-3 where plain PyTorch has 1.7e-3."""
    x, w, _, targets = make(512, 64, 300)
    leaves = [t.bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    peer = [t.detach().clone().requires_grad_() for t in leaves]
    if num_items == "divided outside":
        num_items = (targets != -100).sum()
        (linear_cross_entropy(*leaves, targets, chunk=512, reduction="sum") / num_items).backward()
    else:
        linear_cross_entropy(*leaves, targets, chunk=512, num_items=num_items).backward()
    for given in (peer, exact):
        logits = F.linear(*given)
        loss = F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")
        (loss / ((targets != -100).sum() if num_items is None else num_items)).backward()
    for mine, theirs, truth in zip(leaves, peer, exact):
        assert error(mine.grad, truth.grad) <= 1.1 * error(theirs.grad, truth.grad)


@pytest.mark.parametrize(("trained", "reduction"), [((0,), "mean"), ((1,), "none"), ((2,), "mean"), ((0, 1), "none")], ids=str)
def test_hidden_head_and_bias_may_be_frozen(trained, reduction):
    results = []
    for f in (linear_cross_entropy, linear_cross_entropy_reference):
        x, w, b, targets = make()
        leaves = [t.requires_grad_(i in trained) for i, t in enumerate((x, w, b))]
        f(x, w, targets, bias=b, reduction=reduction, **({"chunk": 5} if f is linear_cross_entropy else {})).sum().backward()
        assert [t.grad is not None for t in leaves] == [i in trained for i in range(3)]
        results.append([t.grad for t in leaves if t.grad is not None])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_upstream_gradient_second_backward_and_second_consumer(reduction):
    x, w, _, targets = make()
    results = []
    for f in (linear_cross_entropy, lambda x, w, t, reduction: F.cross_entropy(F.linear(x, w), t, reduction=reduction)):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        h = a * 1
        loss = f(h, b, targets, reduction=reduction)
        dy = torch.linspace(-3, 3, loss.numel(), dtype=torch.float64).view(loss.shape) if loss.dim() else torch.tensor(-2.5).double()
        total = (loss * dy).sum() + h.square().sum() + b.square().sum()
        total.backward(retain_graph=True)
        total.backward()
        results.append((a.grad, b.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(("reduction", "upstream"), [("mean", 2.0**16), ("none", 2.0**-8)])
def test_fp16_neither_flushes_nor_overflows_under_a_loss_scale(reduction, upstream):
    x, w, _, targets = make(256, 32, 20000)
    # near-uniform probabilities: each 5e-5, and divided by 220 tokens 2e-7, where fp16 has two bits left
    leaves = [(x * 0.1).half().requires_grad_(), w.half().requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    items = (targets != -100).sum()
    (linear_cross_entropy(*leaves, targets, reduction=reduction).sum() / (1 if reduction == "mean" else items) * upstream).backward()
    (linear_cross_entropy_reference(*exact, targets) * upstream).backward()
    for leaf, truth in zip(leaves, exact):
        # what rounding the true gradient to fp16 once costs (a small one is subnormal) is the least that any implementation can reach
        least = error(truth.grad.half(), truth.grad)
        assert error(leaf.grad, truth.grad) <= FACTOR * least + torch.finfo(torch.float16).eps


def test_logits_never_exist_at_once():
    x, w, _, targets = make(512, 8, 2000, dtype=torch.float32)
    seen = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        op._forward.__wrapped__(x, w, None, targets, torch.ones(()), *LossRule().arguments, 64, True, True, False, True)
    assert max(seen) <= 64 * 2000


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunk_size_changes_only_rounding(chunk):
    x, w, b, targets = make()
    got = [t.clone().requires_grad_() for t in (x, w, b)]
    want = [t.clone().requires_grad_() for t in (x, w, b)]
    linear_cross_entropy(got[0], got[1], targets, bias=got[2], chunk=chunk, **OPTIONS["all"]).backward()
    linear_cross_entropy_reference(want[0], want[1], targets, bias=want[2], **OPTIONS["all"]).backward()
    torch.testing.assert_close([t.grad for t in got], [t.grad for t in want])


@pytest.mark.parametrize("items", [None, torch.tensor(0), 0], ids=str)
def test_a_mean_over_no_tokens_is_nan_with_zero_gradients(items):
    """0 / 0 has a gradient of nan, which the head would hand on to every weight; PyTorch's is 0 there."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    loss = linear_cross_entropy(x, w, torch.full((3,), -100), num_items=items)
    loss.backward()
    assert loss.isnan()
    F.cross_entropy(F.linear(x, w), torch.full((3,), -100)).backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("ignored", ["none", "all"])
def test_no_rows_and_no_kept_rows(ignored):
    x, w = torch.randn(0 if ignored == "none" else 3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    targets = torch.full((x.shape[0],), -100)
    for reduction in ("sum", "none"):
        linear_cross_entropy(x, w, targets, reduction=reduction).sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        assert torch.equal(w.grad, torch.zeros_like(w))


def test_leading_dimensions_and_strides():
    x, w, _, targets = make(24)
    results = []
    for f in (linear_cross_entropy, linear_cross_entropy_reference):
        a, b = x.clone().requires_grad_(), w.t().contiguous().requires_grad_()
        loss = f(a.view(4, 6, 8).transpose(0, 1), b.t(), targets.view(4, 6).t(), reduction="none")
        loss.sum().backward()
        results.append((loss, a.grad, b.grad))
    torch.testing.assert_close(results[0], results[1])


def test_bad_arguments_raise_errors_that_name_them():
    x, w, b, targets = make()
    with pytest.raises(ShapeError, match="SH001 hidden"):
        linear_cross_entropy(x, w[:, :3], targets)
    with pytest.raises(ShapeError, match="SH001 bias"):
        linear_cross_entropy(x, w, targets, bias=b[:3])
    with pytest.raises(UsageError, match="chunk is 0"):
        linear_cross_entropy(x, w, targets, chunk=0)
    with pytest.raises(IsotypeError, match="SH002"):
        linear_cross_entropy(x, w, targets + 50)


@pytest.mark.parametrize(("reduction", "cast"), [("mean", torch.bfloat16), pytest.param("none", None, marks=pytest.mark.full)])
def test_compiles_without_a_graph_break(reduction, cast):
    torch._dynamo.reset()
    x, w, b, targets = make(dtype=torch.float32)

    def f(x, w, b):
        return linear_cross_entropy(x * 2, w, targets, bias=b, reduction=reduction, softcap=9.0)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = []
    for g in (compiled, f):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            loss = g(*leaves)
        loss.sum().backward()
        results.append([loss, *(t.grad for t in leaves)])
    torch.testing.assert_close(results[0], results[1])


def test_second_derivatives_are_refused():
    x, w, _, targets = make()
    loss = linear_cross_entropy(x.requires_grad_(), w, targets)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_no_gradient_is_made_under_no_grad(monkeypatch):
    from isotype.ops.cross_entropy import eager

    monkeypatch.setattr(eager, "loss_and_gradient", lambda *a: pytest.fail("a gradient was computed"))
    x, w, _, targets = make()
    with torch.no_grad():
        loss = linear_cross_entropy(x.requires_grad_(), w, targets)
    torch.testing.assert_close(loss, linear_cross_entropy_reference(x, w, targets).detach())
