"""linear_divergence: values and gradients against fp64 and plain PyTorch, and TRL's own op where it
is installed.
"""

import math

import pytest
import torch

from isotype.ops import linear_divergence
from isotype.ops.backend import force_backend
from tests.api import cpu_compiler, divergence_and_entropy, linear_divergence_reference
from tests.ops.trials import FACTOR, error

SHAPED = {
    "temperature": 2.0,
    "logit_scale": 1.5,
    "softcap": 8.0,
    "teacher_logit_scale": 0.5,
    "teacher_softcap": 5.0,
}
BETAS = (0.0, 0.3, 1.0)
EACH = [(0.0, "cpp"), (0.3, "cpp"), (1.0, "cpp"), (0.3, "eager")]


def make(tokens=20, hidden=8, wide=6, classes=50, dtype=torch.float64):
    torch.manual_seed(0)
    x, y = (
        torch.randn(tokens, hidden, dtype=torch.float64),
        torch.randn(tokens, wide, dtype=torch.float64),
    )
    w, u = (
        torch.randn(classes, hidden, dtype=torch.float64),
        torch.randn(classes, wide, dtype=torch.float64),
    )
    return [t.to(dtype) for t in (x, w, y, u)]


def test_cpu_kernels_are_near_fp64_for_heads_of_two_dtypes():
    """Values, entropies and gradients; the teacher in bf16 beside one in fp32, and the reverse,
    with biases, classes past a block.
    """
    narrow, wide = torch.bfloat16, torch.float32
    for beta, trained, mine, theirs in (
        (0.0, False, wide, narrow),
        (0.3, True, narrow, wide),
        (1.0, True, wide, narrow),
    ):
        x, w, y, u = (t / 3 for t in make(classes=8203))
        x, w, y, u = x.to(mine), w.to(mine), y.to(theirs), u.to(theirs)
        b, c = torch.randn(8203).to(mine), torch.randn(8203).to(theirs)
        found = []
        for backend in ("cpp", "eager", "fp64"):
            wide = torch.float64 if backend == "fp64" else None
            leaves = [
                t.detach().to(wide or t.dtype).requires_grad_(i == 0 or trained)
                for i, t in enumerate((x, w, b))
            ]
            with force_backend("eager" if wide else backend):
                options = {
                    "bias": leaves[2],
                    "teacher_bias": c.to(wide or c.dtype),
                    "beta": beta,
                    "chunk": 7,
                    **SHAPED,
                }
                made = divergence_and_entropy(
                    leaves[0], leaves[1], y.to(wide or y.dtype), u.to(wide or u.dtype), **options
                )
            (made[0] * torch.linspace(-1, 2, len(x))).sum().backward()
            found.append([*made, *(t.grad for t in leaves if t.requires_grad)])
        for ours, plain, exact in zip(*found, strict=True):
            assert (
                error(ours, exact)
                <= FACTOR * error(plain, exact) + 16 * torch.finfo(torch.float32).eps
            )


@pytest.mark.skipif(cpu_compiler() is None, reason="no C++ compiler")
def test_the_largest_logits_of_both_sides_are_made_again():
    """Peaked rows, as trained models have: beside plain bf16 logits ten times nearer to fp64."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.float64)
    y, w = x + 0.3 * torch.randn_like(x), torch.randn(4000, 64, dtype=torch.float64)
    heads = [t.bfloat16() for t in (x, w, y, w + 0.3 * torch.randn_like(w))]
    leaf = heads[0].double().requires_grad_()
    exact = linear_divergence_reference(leaf, *(t.double() for t in heads[1:]), beta=0.5)
    (gradient,) = torch.autograd.grad(exact.sum(), leaf)
    off = {}
    for backend in ("eager", "cpp"):
        leaf = heads[0].clone().requires_grad_()
        with force_backend(backend):
            made = linear_divergence(leaf, *heads[1:], beta=0.5)
        off[backend] = (
            error(made, exact),
            error(torch.autograd.grad(made.sum(), leaf)[0], gradient),
        )
    assert off["cpp"][0] < off["eager"][0] / 10
    assert off["cpp"][1] < off["eager"][1] / 5


def test_distributions_that_share_no_class_are_far_apart():
    """Each side is sure of another class, 200 nats apart: KL is 200, their mixture is as near as
    beta says.
    """
    x, w, y, u = torch.eye(2)[:1] * 200, torch.eye(2), torch.eye(2)[1:] * 200, torch.eye(2)
    for beta, backend in EACH:
        with force_backend(backend):
            found = linear_divergence(x, w, y, u, beta=beta)
        want = (
            200.0
            if beta in (0.0, 1.0)
            else -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        )
        assert found.item() == pytest.approx(want, rel=1e-6)


def test_classes_that_both_sides_mask_count_nothing():
    x, w, y, u = make(dtype=torch.float32)
    masked = torch.zeros(50).index_fill_(0, torch.arange(40, 50), -torch.inf)
    for beta, backend in EACH:
        found = []
        for classes, bias in ((50, masked), (40, None)):
            leaf = x.clone().requires_grad_()
            with force_backend(backend):
                made = divergence_and_entropy(
                    leaf, w[:classes], y, u[:classes], bias=bias, teacher_bias=bias, beta=beta
                )
            (gradient,) = torch.autograd.grad(made[0].sum(), leaf)
            found.append((*(values.detach() for values in made), gradient))
        torch.testing.assert_close(*found)


def test_a_trained_head_without_rows_gets_zeros():
    x, w, y, u = make(0, dtype=torch.float32)
    spoilt = [torch.full_like(w, torch.nan) for _ in range(8)]  # what fresh memory may hold
    del spoilt
    w.requires_grad_()
    linear_divergence(x, w, y, u).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_it_holds_no_logits():
    """Both sides' logits would be 2 x 4096 x 8192 fp32, 256 MiB."""
    x, w, y, u = make(4096, 4, 4, 8192, torch.float32)
    x.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        linear_divergence(x, w, y, u, beta=0.5).sum().backward()
    assert max(kept) <= x.numel()


def test_values_and_gradients_are_those_of_trl():
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    x, w, y, u = make(dtype=torch.float32)
    mask = torch.ones(1, len(x))
    scales = {"student_logit_scale": 1.5, "teacher_logit_scale": 0.5, "temperature": 2.0}
    caps = {"student_final_logit_softcapping": 8.0, "teacher_final_logit_softcapping": 5.0}
    for beta in BETAS:
        theirs, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, entropy, _ = trl._chunked_divergence_loss(
            theirs.unsqueeze(0), y.unsqueeze(0), w, u, mask, beta, 1, **scales, **caps
        )
        loss.backward()
        found, entropies = divergence_and_entropy(mine, w, y, u, beta=beta, **SHAPED)
        found.sum().backward()
        assert float(entropies.sum()) == pytest.approx(entropy.item(), rel=1e-5)
        assert found.sum().item() == pytest.approx(loss.item(), rel=1e-5)
        assert error(mine.grad, theirs.grad) < 1e-4
