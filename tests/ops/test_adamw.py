"""AdamW as one kernel: the reference's update, noise that keeps the mean, and machine code for GPUs
that are not here.
"""

import itertools

import pytest
import torch

# library ops import it on their first call, which must not happen while launches are trapped
import torch._dynamo

pytest.importorskip("triton")

from isotype.ops.backend import force_backend
from isotype.testing import compile_matrix
from isotype.testing.interpreter import interpreted
from tests.api import AdamwHyperparameters, adamw_, adamw_reference_
from tests.api import adamw_triton as triton
from tests.gpu import everywhere, kernels

NUMBERS = AdamwHyperparameters(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def tensors(n, weight, gradient, state, device="cpu"):
    g = torch.Generator().manual_seed(n)
    w, dw, mean, square = (torch.randn(n, generator=g) for _ in range(4))
    made = w.to(weight), dw.to(gradient), (mean / 8).to(state), (square.square() / 8).to(state)
    return [t.to(device) for t in made]


@everywhere
def test_the_kernel_makes_the_references_update(device, subtests):
    narrow = (torch.float32, torch.bfloat16)
    for dtypes in itertools.product((*narrow, torch.float16), narrow, narrow):
        want, got = (
            tensors(2500 if device == "cpu" else 100_001, *dtypes, device) for _ in range(2)
        )
        adamw_reference_(*want, NUMBERS, None)
        with kernels(device):
            adamw_(*got, NUMBERS, seed=None)
        with subtests.test(str(dtypes)):
            for mine, theirs in zip(got, want, strict=True):
                # one fp32 operation may round to the other side, and with it the one narrowing
                torch.testing.assert_close(
                    mine, theirs, rtol=2 * torch.finfo(mine.dtype).eps, atol=1e-6
                )


def rounded(value, lr, seed):
    """What becomes of weights of `value` that the update moves up by `lr`, from zero moments."""
    weight = torch.full((4096,), value, dtype=torch.bfloat16)
    gradient = -torch.ones(4096)
    numbers = AdamwHyperparameters(lr=lr, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1)
    adamw_(weight, gradient, torch.zeros(4096), torch.zeros(4096), numbers, seed=seed)
    return weight


def test_noise_keeps_the_mean_differs_by_seed_and_repeats_itself():
    step = 2.0**-10  # an eighth of the way from 1 to the next bf16
    with interpreted(), force_backend("triton"):
        first, again, other = (rounded(1.0, step, seed) for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    deviation = 2.0**-7 * (0.125 * 0.875 / 4096) ** 0.5
    assert abs(float(first.double().mean()) - 1 - step) < 4 * deviation
    # neighbours are independent: of pairs, both rise as often as the product of their chances
    up = (first > 1).double().view(-1, 4)
    assert torch.allclose(
        up.t() @ up / len(up) - torch.diag(up.mean(0)),
        torch.full((4, 4), 1 / 64, dtype=torch.float64).fill_diagonal_(0),
        atol=0.02,
    )


def test_exact_values_stay_and_infinities_stay():
    with interpreted(), force_backend("triton"):
        assert rounded(-1.5, 0.0, 3).unique().tolist() == [-1.5]
        assert rounded(float("inf"), 0.0, 3).unique().tolist() == [float("inf")]
        assert rounded(float("nan"), 0.0, 3).isnan().all()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_kernel_compiles_for_every_dtype_and_target(stochastic):
    def run(weight, gradient, mean, square):
        triton.adamw_(weight, gradient, mean, square, NUMBERS, 12345 if stochastic else None)

    compile_matrix(
        run,
        tuple(tensors(300, *[torch.float32] * 3)),
        targets=["sm_80", "sm_90", "sm_100", "gfx942"],
        fail_on="note",
        binary=True,
    )
