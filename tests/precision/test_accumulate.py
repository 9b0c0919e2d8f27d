"""fp32 gradients on bf16 weights work, and matter: 256 micro-batches against fp64, on one process
and under two-process DDP.
"""

import copy

import pytest
import torch
from torch import nn

from isotype.precision.accumulate import GradientAccumulator

from .test_bucket_sums import Doubled

MICRO_BATCHES = 256


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).bfloat16()


def batches(ranks: int = 1, rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    every = [
        (torch.randn(4, 32, generator=g) + 0.5, torch.randn(4, 8, generator=g))
        for _ in range(MICRO_BATCHES)
    ]
    return every[rank::ranks]


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    dtype = next(model.parameters()).dtype
    ((model(x.to(dtype)) - y.to(dtype)).float() ** 2).mean().backward()


def micro_gradients_summed_in_fp64(model: nn.Module) -> list[torch.Tensor]:
    """The bf16 gradient of each micro-batch, added in fp64: what accumulation alone gets wrong is
    the difference to this.
    """
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for x, y in batches():
        backward(model, x, y)
        for t, p in zip(total, model.parameters(), strict=True):
            t += p.grad
            p.grad = None
    return total


def relative_error(got: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    difference = torch.cat([(g.double() - t).flatten() for g, t in zip(got, true, strict=True)])
    return float(difference.norm() / torch.cat([t.flatten() for t in true]).norm())


def accumulated(dtype: str) -> float:
    model = network()
    true = micro_gradients_summed_in_fp64(copy.deepcopy(model))
    accumulator = GradientAccumulator(model.parameters(), dtype=dtype)
    for x, y in batches():
        backward(model, x, y)
    assert {g.dtype for g in accumulator.gradients()} == {
        torch.float32 if dtype == "fp32" else torch.bfloat16
    }
    return relative_error(accumulator.gradients(), true)


def test_fp32_buffers_are_right_where_bf16_sums_are_percents_off():
    in_bf16, in_fp32 = accumulated("bf16"), accumulated("fp32")
    assert in_bf16 > 5e-3, in_bf16
    assert in_fp32 < 1e-5, in_fp32


def test_zero_frees_and_close_gives_back_plain_gradients():
    model = network()
    accumulator = GradientAccumulator(model.parameters())
    backward(model, *batches()[0])
    assert all(p.grad is None for p in model.parameters())
    accumulator.zero()
    assert accumulator.gradients() == []
    accumulator.close()
    backward(model, *batches()[0])
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gradients_are_summed_in_buckets_of_the_declared_dtype(reduce, monkeypatch):
    monkeypatch.setattr("isotype.precision.accumulate.BUCKET_BYTES", 40)
    weights = [
        nn.Parameter(torch.zeros(n, dtype=dtype))
        for n, dtype in ((4, torch.bfloat16), (3, torch.float32), (30, torch.bfloat16))
    ]
    unused, elsewhere = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))
    both = Doubled()
    accumulator = GradientAccumulator(
        [*weights, unused, elsewhere], dtype="fp32", reduce=reduce, processes=both
    )
    sum(w.float().sum() * 3 for w in weights).backward()
    assert accumulator.reached() == [True, True, True, False, False]
    accumulator.finish_sums()
    # the last one has a gradient in the other process
    accumulator.drop_unreached([True, True, True, False, True])
    assert [accumulator.gradient(w).unique().tolist() for w in weights] == [[6.0]] * 3
    assert accumulator.gradient(unused) is None  # none anywhere: the optimizer must not touch it
    assert accumulator.gradient(elsewhere).tolist() == [0.0, 0.0]
    assert [n for what, n in both.events if what == "sent"] == [7, 30, 7]
    assert (
        both.dtypes
        == {torch.float32 if reduce == "fp32" else torch.bfloat16}
        == set(accumulator.sent_dtypes)
    )
