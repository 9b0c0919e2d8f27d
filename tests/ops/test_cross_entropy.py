"""cross_entropy: every option against fp64, every dtype combination, and the ways in which fused
losses have failed before.
"""

import torch
import torch.nn.functional as F

from isotype.ops import cross_entropy
from isotype.ops.backend import force_backend
from tests.api import cross_entropy_reference, rule
from tests.ops.trials import FACTOR, Sizes, error

OPTIONS = {
    "label_smoothing": 0.1,
    "logit_scale": 1.5,
    "softcap": 8.0,
    "z_loss": 1e-2,
    "num_items": 7,
}


def make(tokens=12, classes=50, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    logits = (torch.randn(tokens, classes, dtype=torch.float64) * 3).to(dtype)
    targets = torch.randint(0, classes, (tokens,))
    if tokens > 3:
        targets[[1, 3]] = -100
    return logits, targets


def test_every_option_of_a_large_vocabulary_is_as_near_to_fp64_as_the_reference():
    logits, targets = make(5, 70001)
    results = {}
    plain, bf16 = cross_entropy_reference, torch.bfloat16
    for path, op, dtype in (
        ("cpp", cross_entropy, bf16), ("eager", cross_entropy, bf16), ("plain", plain, bf16), ("exact", plain, torch.float64)
    ):  # fmt: skip
        x = logits.bfloat16().to(dtype).requires_grad_()
        with force_backend("eager" if path in ("plain", "exact") else path):
            loss = op(x, targets, **OPTIONS)
            (loss * 3).backward()
        results[path] = loss, x.grad
    for cpp, eager, plain, exact in zip(*results.values(), strict=True):
        assert max(error(cpp, exact), error(eager, exact)) <= FACTOR * error(plain, exact) + 1e-6


def test_no_fp32_copy_of_the_logits():
    logits = torch.zeros(64, 65536, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.long)
    with Sizes(torch.float32) as seen:
        # the dispatch mode sees inside the library op only when its body is called directly
        _, lse = rule.cross_entropy_forward(logits.detach(), targets, rule.LossRule())
        rule.cross_entropy_backward(
            logits.detach(),
            targets,
            lse,
            torch.ones(64),
            rule.LossRule(),
            torch.empty_like(logits),
            65536,
        )
    assert max(seen.numbers) <= logits.numel() / 8


def test_all_rows_ignored_is_nan_as_torchs_and_has_zero_gradient():
    x = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(x, torch.full((3,), -100))
    assert loss.isnan()
    loss.backward()
    assert torch.equal(x.grad, torch.zeros(3, 5))
    assert cross_entropy(x, torch.full((3,), -100), num_items=4) == 0


def test_a_masked_class_and_an_ignored_row_of_nan_leave_nothing():
    logits, targets = make(classes=9)
    logits[:, 7] = -torch.inf
    logits[1] = float("nan")
    targets = targets.clamp(max=6)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(mine, targets).backward()
    F.cross_entropy(theirs, targets).backward()
    assert mine.grad.isfinite().all()
    torch.testing.assert_close(mine.grad, theirs.grad.nan_to_num(0.0))
