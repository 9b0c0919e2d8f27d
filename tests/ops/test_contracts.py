"""Every op passes the doctor's own check of its contract: all dtypes and autocasts, long sums, aliasing, layouts, checkpointing, edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from isotype.ops import (
    add_rms_norm,
    attention,
    cpp,
    cross_entropy,
    gated_residual,
    gelu,
    gelu_mul,
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    modulated_layer_norm,
    rms_norm,
    rope,
    silu_mul,
)
from isotype.ops.attention.op import ATTENTION, attention_reference
from isotype.ops.backend import using
from isotype.ops.contract import OpContract
from isotype.ops.cross_entropy.op import CROSS_ENTROPY, cross_entropy_reference
from isotype.ops.experts.op import EXPERTS, Adapter, experts, experts_reference
from isotype.ops.gated.op import GELU, GELU_MUL, SILU_MUL, gelu_mul_reference, gelu_reference, silu_mul_reference
from isotype.ops.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY, linear_cross_entropy_reference
from isotype.ops.linear_divergence import LINEAR_DIVERGENCE, linear_divergence_reference
from isotype.ops.linear_log_probs import LINEAR_LOG_PROBS, linear_log_probs_reference
from isotype.ops.modulation.op import GATED_RESIDUAL, MODULATED_LAYER_NORM, gated_residual_reference, modulated_layer_norm_reference
from isotype.ops.rms_norm.op import ADD_RMS_NORM, RMS_NORM, rms_norm_reference
from isotype.ops.rope.op import ROPE, rope_reference
from isotype.testing import ampcheck
from isotype.testing.amp import inexact
from tests.gpu import DEVICE, kernels, on_a_gpu

LONG = 4160
EVERY = {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def labels(rows: int, classes: int) -> torch.Tensor:
    targets = torch.arange(rows) * 7 % classes
    targets[1::5] = -100
    return targets


def pair(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8), drawn(rows, 8) + 1


def norm(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8), drawn(8)


def modulated(tokens: int) -> tuple[torch.Tensor, ...]:
    return drawn(2, tokens, 8), drawn(2, 8), drawn(2, 8) + 1


def gated(tokens: int) -> tuple[torch.Tensor, ...]:
    return drawn(2, tokens, 8), drawn(2, tokens, 8) + 1, drawn(2, 8)


def loss(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 40) * 3, labels(rows, 40)


def head(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8), drawn(40, 8), labels(rows, 40)


def mild_head(rows: int) -> tuple[torch.Tensor, ...]:
    """Logits of a few units: where one class has nearly all the probability, the entropy's gradient is what rounding the logits leaves."""
    return drawn(rows, 8) / 3, drawn(40, 8), labels(rows, 40)


def two_heads(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8) / 3, drawn(40, 8), drawn(rows, 6) / 3, drawn(40, 6)


def states(positions: int) -> tuple[torch.Tensor, ...]:
    return drawn(1, 2, positions, 8), drawn(1, 1, positions, 8)


def heads(positions: int) -> tuple[torch.Tensor, ...]:
    # a long sum is over the keys of few queries, or the queries of few keys
    return drawn(1, 2, min(positions, 40), 16), drawn(1, 1, positions, 16), drawn(1, 1, positions, 16) + 1


def tables(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    return angle.cos()[None], angle.sin()[None]


def turned(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`f` with fp32 tables, as transformers makes them."""
    return lambda q, k: f(q, k, *(t.to(q.device, torch.promote_types(q.dtype, torch.float32)) for t in tables(q.shape[2])), **options)


def mixture(tokens: int) -> tuple[torch.Tensor, ...]:
    """Four experts, two a token, one of which has no token."""
    index = torch.stack([torch.arange(tokens) * 7 % 3, (torch.arange(tokens) * 7 + 1) % 3], 1)
    return drawn(tokens, 8), index, drawn(tokens, 2) + 1, drawn(4, 16, 8), drawn(4, 8, 8)


def adapted(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`f` with fp32 adapters on both layers of every expert."""

    def run(x: torch.Tensor, *others: torch.Tensor) -> Any:
        lora = {}
        for name, rows, columns in (("up_adapter", 16, 8), ("down_adapter", 8, 8)):
            lora[name] = Adapter(drawn(4, 3, columns).to(x.device), drawn(4, rows, 3).to(x.device), 0.5)
        return f(x, *others, **lora, **options)

    return run


def added(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight), total


def log_probs(**options: Any) -> Callable[..., Any]:
    return lambda h, w, t: linear_log_probs(h, w, t, outputs=("log_probs", "entropy", "logsumexp"), **options)[:3]


def log_probs_reference(**options: Any) -> Callable[..., Any]:
    return lambda h, w, t: linear_log_probs_reference(h, w, t, **options)[:3]


@dataclass
class Case:
    """inputs  rows -> the arguments of one call"""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    contract: OpContract
    inputs: Callable[[int], tuple[torch.Tensor, ...]]


def both(op: Any, reference: Any, contract: OpContract, inputs: Any, **options: Any) -> Case:
    return Case(partial(op, **options), partial(reference, **options), contract, inputs)


CASES = {
    "cross_entropy": both(cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss),
    "cross_entropy-every-option": both(cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss, num_items=7, **EVERY),
    "cross_entropy-none": both(cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss, reduction="none"),
    "linear_cross_entropy": both(linear_cross_entropy, linear_cross_entropy_reference, LINEAR_CROSS_ENTROPY, head),
    "linear_cross_entropy-chunks": Case(
        partial(linear_cross_entropy, chunk=64, **EVERY),
        partial(linear_cross_entropy_reference, **EVERY),
        LINEAR_CROSS_ENTROPY,
        head,
    ),
    "linear_cross_entropy-none": both(
        linear_cross_entropy, linear_cross_entropy_reference, LINEAR_CROSS_ENTROPY, head, reduction="none", **EVERY
    ),
    "linear_log_probs": Case(log_probs(), log_probs_reference(), LINEAR_LOG_PROBS, mild_head),
    "linear_log_probs-every-option": Case(
        log_probs(chunk=64, logit_scale=1.5, softcap=8.0, temperature=0.7),
        log_probs_reference(logit_scale=1.5, softcap=8.0, temperature=0.7),
        LINEAR_LOG_PROBS,
        mild_head,
    ),
    "linear_divergence": both(linear_divergence, linear_divergence_reference, LINEAR_DIVERGENCE, two_heads, beta=0.3),
    "linear_divergence-chunks": Case(
        partial(linear_divergence, chunk=64, temperature=0.7, softcap=8.0),
        partial(linear_divergence_reference, temperature=0.7, softcap=8.0),
        LINEAR_DIVERGENCE,
        two_heads,
    ),
    "rms_norm": both(rms_norm, rms_norm_reference, RMS_NORM, norm),
    "rms_norm-gemma": both(rms_norm, rms_norm_reference, RMS_NORM, norm, unit_offset=True),
    "add_rms_norm": Case(add_rms_norm, added, ADD_RMS_NORM, lambda rows: (drawn(rows, 8), drawn(rows, 8) + 1, drawn(8))),
    "silu_mul": both(silu_mul, silu_mul_reference, SILU_MUL, pair),
    "gelu_mul": both(gelu_mul, gelu_mul_reference, GELU_MUL, pair),
    "gelu_mul-tanh": both(gelu_mul, gelu_mul_reference, GELU_MUL, pair, approximate="tanh"),
    "gelu": both(gelu, gelu_reference, GELU, lambda rows: (drawn(rows, 8),)),
    "gelu-tanh": both(gelu, gelu_reference, GELU, lambda rows: (drawn(rows, 8),), approximate="tanh"),
    "modulated_layer_norm": both(modulated_layer_norm, modulated_layer_norm_reference, MODULATED_LAYER_NORM, modulated),
    "gated_residual": both(gated_residual, gated_residual_reference, GATED_RESIDUAL, gated),
    "experts-none": both(experts, experts_reference, EXPERTS, mixture),
    "experts": Case(adapted(experts), adapted(experts_reference), EXPERTS, mixture),
    "attention": both(attention, attention_reference, ATTENTION, heads),
    "rope": Case(turned(rope), turned(rope_reference), ROPE, states),
    "rope-interleaved": Case(turned(rope, interleaved=True), turned(rope_reference, interleaved=True), ROPE, states),
}


OPTIONAL = ("-none", "-chunks", "-tanh", "-gemma", "-interleaved")


def without_a_finding(case: Case, inputs: Any) -> int:
    report = ampcheck(case.op, inputs, reference=case.reference, contract=case.contract, raises=False)
    assert not report.findings, report.render()
    assert not report.refused
    assert not report.skipped
    return report.tried


ON_A_CPU = [
    "eager",
    pytest.param("cpp", marks=pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")),
]


# `make test` runs each op's own case on the C++ kernels; its options, and plain PyTorch, are left to the whole matrix
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), ON_A_CPU[1]])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if name.endswith(OPTIONAL) else []) for name, case in CASES.items()], ids=CASES
)
def test_keeps_its_contract(case, backend):
    with using(backend):
        assert without_a_finding(case, [case.inputs(6), case.inputs(LONG)]) >= 32
    assert not cpp.fallbacks()


@pytest.mark.full
@pytest.mark.parametrize("backend", ON_A_CPU)
def test_rope_keeps_its_contract_with_tables_of_any_dtype(backend):
    with using(backend):
        assert without_a_finding(Case(rope, rope_reference, ROPE, states), (*states(6), *tables(6))) >= 140


# One of each kernel: what its other flags, chunks and an addition before it compute is held by test_kernels to plain PyTorch, whose
# contract is checked above
ON_KERNELS = [
    "cross_entropy-every-option",
    "rms_norm",
    "silu_mul",
    "gelu_mul",
    "rope-interleaved",
    "modulated_layer_norm",
    "gated_residual",
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("rms_norm", "silu_mul") else pytest.mark.full) for name in ON_KERNELS]
)
def test_its_kernels_keep_it_in_the_interpreter(name, monkeypatch):
    pytest.importorskip("triton")
    from isotype.testing.interpreter import interpreted

    # an interpreted program takes about a millisecond, and rows are programs of their own
    monkeypatch.setattr(inexact, "SOME", 16)
    # and a rotation sums nothing
    monkeypatch.setattr(inexact, "LONG", 4 if "rope" in name else 32)
    with interpreted(), using("triton"):
        without_a_finding(CASES[name], CASES[name].inputs(2 if "rope" in name else 3))


@on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_keeps_its_contract_on_a_gpu(name, monkeypatch):
    case, long = CASES[name], 160
    if DEVICE == "cpu":
        monkeypatch.setattr(inexact, "SOME", 4)
        monkeypatch.setattr(inexact, "LONG", 4)
        long = 3
    with kernels():
        inputs = tuple(t.to(DEVICE) for t in case.inputs(long))
        report = ampcheck(case.op, inputs, reference=case.reference, contract=case.contract, raises=False)
    assert not report.findings, report.render()
