"""linear_log_probs: every output and every gradient path against fp64 and plain PyTorch, and
against TRL's own op where it is installed.
"""

import pytest
import torch
import torch.nn.functional as F

from isotype.ops import linear_cross_entropy, linear_log_probs
from isotype.ops.backend import force_backend
from tests.api import OUTPUTS, linear_log_probs_reference
from tests.ops.trials import error

OPTIONS = {"logit_scale": 1.5, "softcap": 8.0, "temperature": 0.7}
DIFFERENTIABLE = ("log_probs", "entropy", "logsumexp")


def make(tokens=20, hidden=8, classes=50, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, dtype=torch.float64) * 2
    w = torch.randn(classes, hidden, dtype=torch.float64) / hidden**0.5
    b = torch.randn(classes, dtype=torch.float64)
    targets = torch.randint(0, classes, (tokens,))
    targets[::7] = -100
    return x.to(dtype), w.to(dtype), b.to(dtype), targets


def weighed(values):
    """A loss with another upstream gradient for every token and output."""
    total = 0.0
    for i, name in enumerate(DIFFERENTIABLE):
        v = getattr(values, name)
        if v is not None:
            total = (
                total
                + (
                    v
                    * torch.linspace(-1 - i, 2, v.numel(), dtype=v.dtype, device=v.device).view(
                        v.shape
                    )
                ).sum()
            )
    return total


def test_every_output_is_the_references():
    x, w, b, targets = make(20, 8, 8200, dtype=torch.float32)
    x, targets = x.view(4, 5, 8), targets.view(4, 5)
    want = linear_log_probs_reference(x.double(), w.double(), targets, bias=b.double(), **OPTIONS)
    for backend in ("eager", "cpp"):
        with force_backend(backend):
            got = linear_log_probs(x, w, targets, bias=b, outputs=OUTPUTS, chunk=7, **OPTIONS)
        for name, value, truth in zip(OUTPUTS, got, want, strict=True):
            assert value.shape == (4, 5), name
            torch.testing.assert_close(value.to(truth.dtype), truth, rtol=2e-5, atol=2e-5, msg=name)


def test_large_logits_do_not_cancel_in_the_entropy():
    x, w, _, targets = make(16, 8, 400, dtype=torch.float32)
    moved = torch.cat([x, torch.ones(16, 1)], 1), torch.cat([w, torch.full((400, 1), 1000.0)], 1)
    got = linear_log_probs(*moved, targets, outputs=("entropy",)).entropy
    want = linear_log_probs_reference(*(t.double() for t in moved), targets)[1]
    # the logits themselves are rounded to 1000 * eps; the sum over classes must not multiply that
    assert float((got - want).abs().max()) < 5e-4


def test_a_masked_class_and_a_batch_without_labels():
    x, w, b, targets = make(9, 8, 40, dtype=torch.float32)
    b[3] = -torch.inf
    targets = targets.masked_fill(targets == 3, 4)
    for backend in ("eager", "cpp"):
        leaf = x.clone().requires_grad_()
        with force_backend(backend):
            values = linear_log_probs(leaf, w, targets, bias=b, outputs=DIFFERENTIABLE)
            weighed(values).backward()
        assert all(bool(v.isfinite().all()) for v in (values.log_probs, values.entropy, leaf.grad))
        leaf = x.clone().requires_grad_()
        with force_backend(backend):
            linear_log_probs(leaf, w, torch.full_like(targets, -100)).log_probs.sum().backward()
        assert not leaf.grad.any()


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "temperature": 0.8}])
def test_the_largest_logits_of_bf16_rows_are_those_of_fp32_products(options):
    """Peaked rows, as a trained model has: beside plain bf16 logits ten times nearer to fp64."""
    torch.manual_seed(0)
    w = (torch.randn(2000, 128) * 0.8).bfloat16()
    x = torch.randn(64, 128).bfloat16()
    exact = linear_log_probs_reference(
        x.double(), w.double(), torch.zeros(64, dtype=torch.long), **options
    )[-1]
    p = F.log_softmax(transformed(F.linear(x.double(), w.double()), options), -1).exp()
    targets = torch.multinomial(p, 1).squeeze(-1)
    truth = p.gather(-1, targets.unsqueeze(-1)).squeeze(-1).log()
    dz = F.one_hot(targets, 2000) - p
    if "softcap" in options:
        dz = (
            dz
            * (1 - (F.linear(x.double(), w.double()) / options["softcap"]).tanh().square())
            / options["temperature"]
        )
    errors = {}
    for backend in ("eager", "cpp"):
        leaf = x.clone().requires_grad_()
        with force_backend(backend):
            made = linear_log_probs(leaf, w, targets, outputs=("log_probs", "top1"), **options)
            made.log_probs.sum().backward()
            loss = (
                linear_cross_entropy(x, w, targets, reduction="sum")
                if not options
                else -made.log_probs.sum()
            )
        errors[backend] = (
            error(made.log_probs, truth),
            error(leaf.grad, dz @ w.double()),
            abs(loss.item() + truth.sum().item()),
        )
    assert torch.equal(made.top1, exact)
    assert errors["cpp"][0] < errors["eager"][0] / 10
    # what is left is the rounding of the gradient itself
    assert errors["cpp"][1] < errors["eager"][1] / 2
    assert errors["cpp"][2] < errors["eager"][2] / 3


def transformed(z, options):
    z = options["softcap"] * torch.tanh(z / options["softcap"]) if "softcap" in options else z
    return z / options.get("temperature", 1.0)
