"""linear_divergence: values and gradients against fp64 and plain PyTorch, and TRL's own op where it is installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from isotype.errors import ShapeError, UsageError
from isotype.ops import linear_divergence
from isotype.ops.linear_divergence import linear_divergence_reference
from tests.ops.trials import FACTOR, error

SHAPED = {"temperature": 2.0, "logit_scale": 1.5, "softcap": 8.0, "teacher_logit_scale": 0.5, "teacher_softcap": 5.0}
BETAS = (0.0, 0.3, 1.0)


def make(tokens=20, hidden=8, wide=6, classes=50, dtype=torch.float64):
    torch.manual_seed(0)
    x, y = torch.randn(tokens, hidden, dtype=torch.float64), torch.randn(tokens, wide, dtype=torch.float64)
    w, u = torch.randn(classes, hidden, dtype=torch.float64), torch.randn(classes, wide, dtype=torch.float64)
    return [t.to(dtype) for t in (x, w, y, u)]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("options", [{}, SHAPED])
def test_gradients_agree_with_finite_differences(beta, options):
    x, w, y, u = make(5, 3, 4, 7)
    b, c = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def op(x, w, b):
        return linear_divergence(x, w, y, u, bias=b, teacher_bias=c, beta=beta, chunk=2, **options)

    assert torch.autograd.gradcheck(op, tuple(t.requires_grad_() for t in (x, w, b)))
    torch.testing.assert_close(op(x, w, b), linear_divergence_reference(x, w, y, u, bias=b, teacher_bias=c, beta=beta, **options))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("trained", ["hidden", "both"])
def test_bf16_errs_no_more_than_plain_logits(beta, trained):
    exact = make(48, 32, 24, 600)
    given = [t.bfloat16() for t in exact]
    upstream = torch.linspace(0.5, 2.0, 48)

    def gradients(f, tensors):
        leaves = [t.clone().requires_grad_(i == 0 or (i == 1 and trained == "both")) for i, t in enumerate(tensors)]
        value = f(*leaves)
        (value * upstream.to(value.dtype)).sum().backward()
        return [value.detach(), *(t.grad for t in leaves if t.grad is not None)]

    def plain(x, w, y, u):
        s, t = F.linear(x, w).float(), F.linear(y, u).float()
        eye = torch.eye(s.shape[-1])
        return linear_divergence_reference(s, eye, t, eye, beta=beta)

    ours = gradients(lambda *t: linear_divergence(*t, beta=beta, chunk=20), given)
    naive = gradients(plain, given)
    truth = gradients(lambda *t: linear_divergence_reference(*t, beta=beta), [t.double() for t in given])
    for a, b, c in zip(ours, naive, truth, strict=True):
        assert error(a, c) <= FACTOR * error(b, c)
    assert ours[0].dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in ours[1:])


def test_it_holds_no_logits():
    """Both sides' logits would be 2 x 4096 x 8192 fp32, 256 MiB."""
    x, w, y, u = make(4096, 4, 4, 8192, torch.float32)
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_divergence(x, w, y, u, beta=0.5).sum().backward()
    assert max(kept) <= x.numel()


def test_bad_arguments_are_refused():
    x, w, y, u = make()
    with pytest.raises(ShapeError, match="a student of"):
        linear_divergence(x, w, y, u[:-1])
    with pytest.raises(UsageError, match="beta is 2"):
        linear_divergence(x, w, y, u, beta=2)
    with pytest.raises(UsageError, match="temperature is 0"):
        linear_divergence(x, w, y, u, temperature=0)


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
