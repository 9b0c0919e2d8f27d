"""AdamW with rounding and fp32 states, the moving average, and the learning rate."""

from itertools import pairwise

import pytest
import torch
from tests.api import draw_noise_bits, learning_rate, stochastic_round_
from torch import nn

from isotype.config.schema import TrainSection
from isotype.precision import PRESETS
from isotype.training.optimizer import Ema, MixedAdamW, build_optimizer


def mixed(
    parameters, *, gradient=lambda p: p.grad, lr=1e-2, state="fp32", rounding="nearest", decay=0.0
):
    groups = [{"params": list(parameters), "weight_decay": decay}]
    return MixedAdamW(
        groups,
        lr=lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        gradient=gradient,
        state=state,
        rounding=rounding,
        seed=0,
    )


def test_equals_torchs_adamw_in_fp32():
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(8, 8))
    theirs = nn.Parameter(ours.detach().clone())
    a, b = mixed([ours], decay=0.1), torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for _ in range(20):
        gradient = torch.randn(8, 8)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        a.step()
        b.step()
    # both round each fp32 operation; their order differs
    assert torch.allclose(
        ours,
        theirs,
        rtol=0,
        atol=20 * torch.finfo(torch.float32).eps * float(theirs.detach().abs().max()),
    )


def test_stochastic_rounding_keeps_the_mean_and_exact_values():
    value = torch.full((200_000,), 1.0 + 2.0**-10)  # an eighth of the way to the next bf16
    target = torch.empty(200_000, dtype=torch.bfloat16)
    noise, *_ = draw_noise_bits(0, 0, 200_000, target.device)
    stochastic_round_(target, value, noise)
    assert set(target.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    expected, deviation = 2.0**-10, 2.0**-7 * (0.125 * 0.875 / 200_000) ** 0.5
    assert abs(float(target.double().mean()) - 1 - expected) < 5 * deviation
    exact = torch.tensor([0.0, -1.5, float("inf"), float("-inf"), 3.0])
    out = torch.empty(5, dtype=torch.bfloat16)
    stochastic_round_(out, exact, noise[:5])
    assert out.tolist() == exact.tolist()


def test_bf16_weights_move_as_far_as_they_should_only_with_stochastic_rounding():
    """A constant gradient moves fp32 weights by steps x learning rate: how much of it do bf16
    weights move?
    """
    start = torch.randn(64, 64).bfloat16()
    for rounding, low, high in (("nearest", 0.0, 0.3), ("stochastic", 0.9, 1.1)):
        p = nn.Parameter(start.clone())
        optimizer = mixed([p], lr=1e-4, rounding=rounding)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved = float((start.double() - p.detach().double()).mean()) / (50 * 1e-4)
        assert low <= moved <= high, rounding


# --- The moving average of trained weights.


def test_an_average_follows_its_weights_in_fp32():
    model = nn.Linear(4, 3, dtype=torch.bfloat16)
    ema = Ema(model, 0.9, "fp32")
    expected = model.weight.detach().double()
    for step in range(1, 40):
        with torch.no_grad():
            model.weight.add_(0.01)
        ema.update(step)
        kept = min(0.9, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * model.weight.detach().double()
    assert {average.dtype for average in ema.averages.values()} == {torch.float32}
    torch.testing.assert_close(ema.averages["weight"].double(), expected, rtol=1e-5, atol=1e-6)


# --- The learning rate.


def course(total=100, **train):
    section = TrainSection(learning_rate=1.0, **train)
    return [learning_rate(section, step, total) for step in range(1, total + 1)]


def test_rates_warm_up_to_the_peak_and_fall_to_their_minimum(subtests):
    for schedule in ("cosine", "linear", "constant", "wsd"):
        with subtests.test(schedule):
            rates = course(schedule=schedule, warmup=10, min_learning_rate=0.1)
            assert rates[0] == pytest.approx(1 / 11)
            assert rates[9] < rates[10] == max(rates) == 1.0
            assert all(a >= b for a, b in pairwise(rates[10:]))
            assert 0.1 <= rates[-1] < 0.16 or schedule == "constant"
    rates = course(schedule="wsd", warmup=0, decay=0.25)
    assert rates[:76] == [1.0] * 76
    assert rates[76] < 1.0


def test_weight_decay_is_on_matrices_only():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    optimizer = build_optimizer(
        model, TrainSection(weight_decay=0.1), PRESETS["fp32"], lambda p: p.grad
    )
    assert {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    } == {2: 0.1, 1: 0.0}
