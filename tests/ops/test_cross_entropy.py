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
from tests.ops.trials import FACTOR, error, plain_weighted

OPTIONS = {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2, "num_items": 7}


def make(tokens=12, classes=50, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    logits = (torch.randn(tokens, classes, dtype=torch.float64) * 3).to(dtype)
    targets = torch.randint(0, classes, (tokens,))
    if tokens > 3:
        targets[[1, 3]] = -100
    return logits, targets


@pytest.mark.parametrize("path", ["cpp", "eager"])
def test_every_option_of_a_large_vocabulary_is_as_near_to_fp64_as_the_reference(path):
    logits, targets = make(5, 70001)
    results = []
    for op, dtype in ((cross_entropy, torch.bfloat16), (cross_entropy_reference, torch.bfloat16), (cross_entropy_reference, torch.float64)):
        x = logits.bfloat16().to(dtype).requires_grad_()
        with using(path):
            loss = op(x, targets, **OPTIONS)
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


# --- weights of classes and tokens


EYE = torch.eye(50, dtype=torch.float64)


@pytest.mark.parametrize(("reduction", "which"), [("mean", "both"), ("sum", "classes"), ("none", "tokens")])
def test_a_weighted_loss_and_its_gradients_are_pytorchs(reduction, which):
    results = []
    for op in ("mine", "plain"):
        logits, targets = make(20)
        logits.requires_grad_()
        classes = torch.linspace(0.1, 2.0, 50, dtype=torch.float64) if which != "tokens" else None
        tokens = torch.linspace(0.5, 3.0, 20, dtype=torch.float64).requires_grad_() if which != "classes" else None
        if op == "mine":
            loss = cross_entropy(
                logits, targets, reduction=reduction, class_weights=classes, token_weights=tokens, label_smoothing=0.1,
                logit_scale=1.5, z_loss=1e-2,
            )  # fmt: skip
        else:
            loss = plain_weighted(logits, EYE, None, targets, reduction, classes, tokens, 0.1, 1.5, 1e-2)
        (loss * torch.linspace(-1, 2, loss.numel(), dtype=torch.float64).view(loss.shape)).sum().backward()
        results.append([loss.detach(), logits.grad, *([tokens.grad] if tokens is not None else [])])
    torch.testing.assert_close(*results)


def test_a_softcap_with_weights_and_a_z_loss():
    logits, targets = make(20)
    tokens = torch.linspace(0.5, 3.0, 20, dtype=torch.float64)
    capped = 5 * torch.tanh(logits / 5)
    want = plain_weighted(capped, EYE, None, targets, "mean", None, tokens, 0.0, 1.0, 1e-2)
    torch.testing.assert_close(cross_entropy(logits, targets, token_weights=tokens, softcap=5.0, z_loss=1e-2), want)


T, FIFTY = torch.tensor([0, 1]), make(20)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: cross_entropy(torch.randn(2, 5), torch.tensor([0, 5])), IsotypeError, r"SH002 1 .* of range, .* is 5: expected 0\.\.4"),
        (lambda: cross_entropy(torch.randn(2, 5), torch.tensor([0, -1])), IsotypeError, "SH002"),
        (lambda: cross_entropy(torch.randn(2, 5), T.float()), DtypeError, "DT001"),
        (lambda: cross_entropy(torch.randn(2, 5), T[:1]), ShapeError, "SH001"),
        (lambda: cross_entropy(torch.randn(2, 5), T, reduction="average"), UsageError, "reduction"),
        (lambda: cross_entropy(torch.randn(2, 5), T, reduction="sum", num_items=3), UsageError, "num_items=3 has no effect"),
        (lambda: cross_entropy(torch.randn(2, 5), T, label_smoothing=2.0), UsageError, "label_smoothing"),
        (lambda: cross_entropy(*FIFTY, class_weights=torch.ones(3)), ShapeError, "class_weights"),
        (lambda: cross_entropy(*FIFTY, token_weights=torch.ones(3)), ShapeError, "token_weights"),
        (lambda: cross_entropy(*FIFTY, class_weights=torch.ones(50, requires_grad=True)), UsageError, "gets none"),
        (lambda: cross_entropy(*FIFTY, class_weights=torch.ones(50), label_smoothing=0.1, softcap=5.0), UsageError, "not available"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
