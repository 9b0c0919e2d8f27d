"""Weights of classes and tokens against PyTorch's own, and the values that statistics return."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import ShapeError, UsageError
from isotype.ops import linear_cross_entropy
from tests.ops.linear_cross_entropy.test_linear_cross_entropy import make
from tests.ops.trials import FACTOR, error


def plain(x, w, b, targets, reduction, class_weights, token_weights, smoothing, scale, z_loss):
    z = F.linear(x, w, b) * scale
    loss = F.cross_entropy(z, targets, weight=class_weights, label_smoothing=smoothing, reduction="none")
    loss = loss + z_loss * torch.logsumexp(z, -1).square().masked_fill(targets == -100, 0.0)
    if token_weights is not None:
        loss = loss * token_weights
    if reduction == "none":
        return loss
    counted = torch.ones_like(loss) if token_weights is None else token_weights
    counted = counted if class_weights is None else counted * class_weights[targets.clamp(min=0)]
    total = loss.sum()
    return total if reduction == "sum" else total / counted.masked_fill(targets == -100, 0.0).sum()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("which", ["classes", "tokens", "both"])
def test_a_weighted_loss_and_its_gradients_are_pytorchs(reduction, smoothing, which):
    results = []
    for op in ("mine", "plain"):
        x, w, b, targets = make()
        classes = torch.linspace(0.1, 2.0, 50, dtype=torch.float64) if which != "tokens" else None
        tokens = torch.linspace(0.5, 3.0, 20, dtype=torch.float64).requires_grad_() if which != "classes" else None
        leaves = [t.requires_grad_() for t in (x, w, b)]
        if op == "mine":
            loss = linear_cross_entropy(
                x, w, targets, bias=b, reduction=reduction, class_weights=classes, token_weights=tokens, label_smoothing=smoothing,
                logit_scale=1.5, z_loss=1e-2, chunk=6,
            )  # fmt: skip
        else:
            loss = plain(x, w, b, targets, reduction, classes, tokens, smoothing, 1.5, 1e-2)
        (loss * torch.linspace(-1, 2, loss.numel(), dtype=torch.float64).view(loss.shape)).sum().backward()
        results.append([loss.detach(), *(t.grad for t in leaves), *([tokens.grad] if tokens is not None else [])])
    torch.testing.assert_close(*results)


def test_torchs_own_mean_divides_by_the_weights_of_the_targets():
    x, w, _, targets = make()
    classes = torch.linspace(0.1, 2.0, 50, dtype=torch.float64)
    torch.testing.assert_close(
        linear_cross_entropy(x, w, targets, class_weights=classes), F.cross_entropy(F.linear(x, w), targets, weight=classes)
    )


def test_bf16_gradients_are_as_good_as_plain_pytorchs():
    x, w, b, targets = make(256, 64, 900)
    classes, tokens = torch.linspace(0.1, 2.0, 900), torch.linspace(0.5, 3.0, 256)
    leaves = [t.bfloat16().requires_grad_() for t in (x, w, b)]
    peer = [t.detach().clone().requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    linear_cross_entropy(
        leaves[0], leaves[1], targets, bias=leaves[2], class_weights=classes, token_weights=tokens, label_smoothing=0.1, chunk=64
    ).backward()
    for given in (peer, exact):
        z = F.linear(*given)
        z = z if z.dtype == torch.float64 else z.float()
        loss = F.cross_entropy(z, targets, weight=classes.to(z), label_smoothing=0.1, reduction="none") * tokens.to(z)
        (loss.sum() / (tokens * classes[targets.clamp(min=0)]).masked_fill(targets == -100, 0.0).sum()).backward()
    for mine, theirs, truth in zip(leaves, peer, exact):
        assert error(mine.grad, truth.grad) <= FACTOR * error(theirs.grad, truth.grad)


def test_statistics_return_logsumexp_and_the_z_loss():
    x, w, b, targets = make()
    loss, seen = linear_cross_entropy(x, w, targets, bias=b, z_loss=1e-2, statistics=True, reduction="none")
    lse = torch.logsumexp(F.linear(x, w, b), -1).masked_fill(targets == -100, 0.0)
    torch.testing.assert_close(seen.logsumexp, lse)
    torch.testing.assert_close(seen.z_loss, 1e-2 * lse.square())
    torch.testing.assert_close(loss - seen.z_loss, -seen.log_probs)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"class_weights": torch.ones(3)}, ShapeError, "class_weights"),
        ({"token_weights": torch.ones(3)}, ShapeError, "token_weights"),
        ({"class_weights": torch.ones(50, requires_grad=True)}, UsageError, "gets none"),
        ({"class_weights": torch.ones(50), "label_smoothing": 0.1, "softcap": 5.0}, UsageError, "not available"),
        ({"token_weights": torch.ones(20), "statistics": True}, UsageError, "linear_log_probs"),
    ],
)
def test_weights_of_a_wrong_shape_are_refused(given, kind, words):
    x, w, _, targets = make()
    with pytest.raises(kind, match=words):
        linear_cross_entropy(x, w, targets, **given)
