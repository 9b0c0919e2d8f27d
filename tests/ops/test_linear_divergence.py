"""linear_divergence: values and gradients against fp64 and plain PyTorch, and TRL's own op where it is installed."""

from __future__ import annotations

import pytest
import torch

from isotype.errors import ShapeError, UsageError
from isotype.ops import linear_divergence
from isotype.ops.linear_divergence.op import linear_divergence_reference
from tests.ops.trials import error

SHAPED = {"temperature": 2.0, "logit_scale": 1.5, "softcap": 8.0, "teacher_logit_scale": 0.5, "teacher_softcap": 5.0}
BETAS = (0.0, 0.3, 1.0)


def make(tokens=20, hidden=8, wide=6, classes=50, dtype=torch.float64):
    torch.manual_seed(0)
    x, y = torch.randn(tokens, hidden, dtype=torch.float64), torch.randn(tokens, wide, dtype=torch.float64)
    w, u = torch.randn(classes, hidden, dtype=torch.float64), torch.randn(classes, wide, dtype=torch.float64)
    return [t.to(dtype) for t in (x, w, y, u)]


@pytest.mark.parametrize("beta", BETAS)
def test_gradients_agree_with_finite_differences(beta):
    x, w, y, u = make(5, 3, 4, 7)
    b, c = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def op(x, w, b):
        return linear_divergence(x, w, y, u, bias=b, teacher_bias=c, beta=beta, chunk=2, **SHAPED)

    assert torch.autograd.gradcheck(op, tuple(t.requires_grad_() for t in (x, w, b)))
    torch.testing.assert_close(op(x, w, b), linear_divergence_reference(x, w, y, u, bias=b, teacher_bias=c, beta=beta, **SHAPED))


def test_it_holds_no_logits():
    """Both sides' logits would be 2 x 4096 x 8192 fp32, 256 MiB."""
    x, w, y, u = make(4096, 4, 4, 8192, torch.float32)
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_divergence(x, w, y, u, beta=0.5).sum().backward()
    assert max(kept) <= x.numel()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"teacher_weight": torch.ones(49, 6)}, ShapeError, "a student of"),
        ({"beta": 2}, UsageError, "beta is 2"),
        ({"temperature": 0}, UsageError, "temperature is 0"),
    ],
)
def test_bad_arguments_are_named(changes, kind, message):
    x, w, y, u = make()
    with pytest.raises(kind, match=message):
        linear_divergence(x, w, y, **{"teacher_weight": u, **changes})


@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_trl(beta):
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    x, w, y, u = make(dtype=torch.float32)
    theirs = x.clone().requires_grad_()
    mask = torch.ones(1, len(x))
    scales = {"student_logit_scale": 1.5, "teacher_logit_scale": 0.5, "temperature": 2.0}
    caps = {"student_final_logit_softcapping": 8.0, "teacher_final_logit_softcapping": 5.0}
    loss, *_ = trl._chunked_divergence_loss(theirs.unsqueeze(0), y.unsqueeze(0), w, u, mask, beta, 1, **scales, **caps)
    loss.backward()
    x.requires_grad_()
    ours = linear_divergence(x, w, y, u, beta=beta, **SHAPED).sum()
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    assert error(x.grad, theirs.grad) < 1e-4
