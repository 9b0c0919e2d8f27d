"""Weights of classes and tokens in the loss of given logits, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import ShapeError, UsageError
from isotype.ops import cross_entropy
from tests.ops.linear_cross_entropy.test_weighted import plain
from tests.ops.trials import FACTOR, error

EYE = torch.eye(50, dtype=torch.float64)


def make(rows=20, dtype=torch.float64):
    torch.manual_seed(0)
    logits = (torch.randn(rows, 50, dtype=torch.float64) * 3).to(dtype)
    targets = torch.randint(0, 50, (rows,))
    targets[::7] = -100
    return logits, targets


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("which", ["classes", "tokens", "both"])
def test_a_weighted_loss_and_its_gradients_are_pytorchs(reduction, smoothing, which):
    results = []
    for op in ("mine", "plain"):
        logits, targets = make()
        logits.requires_grad_()
        classes = torch.linspace(0.1, 2.0, 50, dtype=torch.float64) if which != "tokens" else None
        tokens = torch.linspace(0.5, 3.0, 20, dtype=torch.float64).requires_grad_() if which != "classes" else None
        if op == "mine":
            loss = cross_entropy(
                logits, targets, reduction=reduction, class_weights=classes, token_weights=tokens, label_smoothing=smoothing,
                logit_scale=1.5, z_loss=1e-2,
            )  # fmt: skip
        else:
            loss = plain(logits, EYE, None, targets, reduction, classes, tokens, smoothing, 1.5, 1e-2)
        (loss * torch.linspace(-1, 2, loss.numel(), dtype=torch.float64).view(loss.shape)).sum().backward()
        results.append([loss.detach(), logits.grad, *([tokens.grad] if tokens is not None else [])])
    torch.testing.assert_close(*results)


def test_a_softcap_with_weights_and_a_z_loss():
    logits, targets = make()
    tokens = torch.linspace(0.5, 3.0, 20, dtype=torch.float64)
    capped = 5 * torch.tanh(logits / 5)
    want = plain(capped, EYE, None, targets, "mean", None, tokens, 0.0, 1.0, 1e-2)
    torch.testing.assert_close(cross_entropy(logits, targets, token_weights=tokens, softcap=5.0, z_loss=1e-2), want)


def test_rows_of_any_shape_and_a_class_masked_away():
    logits, targets = make()
    logits[:, 3] = -torch.inf
    targets[targets == 3] = 4
    classes = torch.linspace(0.1, 2.0, 50, dtype=torch.float64)
    classes[3] = 0.0
    shaped = cross_entropy(logits.view(4, 5, 50), targets.view(4, 5), class_weights=classes, label_smoothing=0.1)
    assert shaped == cross_entropy(logits, targets, class_weights=classes, label_smoothing=0.1)
    assert shaped.isfinite()


def test_bf16_gradients_are_as_good_as_plain_pytorchs():
    logits, targets = make(256, torch.bfloat16)
    classes = torch.linspace(0.1, 2.0, 50)
    grads = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = logits.detach().clone().to(torch.float64 if dtype == torch.float64 else torch.bfloat16).requires_grad_()
        if dtype == torch.bfloat16:
            cross_entropy(x, targets, class_weights=classes, label_smoothing=0.1).backward()
        else:
            F.cross_entropy(x.to(dtype), targets, weight=classes.to(dtype), label_smoothing=0.1).backward()
        grads.append(x.grad)
    assert grads[0].dtype == torch.bfloat16
    assert error(grads[0], grads[2]) <= FACTOR * error(grads[1], grads[2])


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"class_weights": torch.ones(3)}, ShapeError, "class_weights"),
        ({"token_weights": torch.ones(3)}, ShapeError, "token_weights"),
        ({"class_weights": torch.ones(50, requires_grad=True)}, UsageError, "gets none"),
        ({"class_weights": torch.ones(50), "label_smoothing": 0.1, "softcap": 5.0}, UsageError, "not available"),
    ],
)
def test_weights_of_a_wrong_shape_are_refused(given, kind, words):
    logits, targets = make()
    with pytest.raises(kind, match=words):
        cross_entropy(logits, targets, **given)
