"""Every op with its reference, contract and inputs: the rows of the tables that test_contracts.py
and test_every_op.py walk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isotype.ops import (
    add_rms_norm,
    attention,
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
from tests.api import (
    ADD_RMS_NORM,
    CROSS_ENTROPY,
    EXPERTS,
    GATED_RESIDUAL,
    GELU,
    GELU_MUL,
    LINEAR_CROSS_ENTROPY,
    LINEAR_DIVERGENCE,
    LINEAR_LOG_PROBS,
    MODULATED_LAYER_NORM,
    RMS_NORM,
    ROPE,
    SILU_MUL,
    OpContract,
    cross_entropy_reference,
    experts_reference,
    gated_residual_reference,
    gelu_mul_reference,
    gelu_reference,
    linear_cross_entropy_reference,
    linear_divergence_reference,
    linear_log_probs_reference,
    modulated_layer_norm_reference,
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
)
from tests.api import ops_experts_op_Adapter as Adapter
from tests.api import ops_experts_op_experts as experts

LONG = 4160
EVERY = {"label_smoothing": 0.1, "logit_scale": 1.5, "softcap": 8.0, "z_loss": 1e-2}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def labels(rows: int, classes: int) -> torch.Tensor:
    targets = torch.arange(rows) * 7 % classes
    targets[1::5] = -100
    return targets


def one(rows: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return (drawn(rows, width),)


def pair(rows: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return drawn(rows, width), drawn(rows, width) + 1


def norm(rows: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return drawn(rows, width), drawn(width)


def added_norm(rows: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return *pair(rows, width), drawn(width)


def modulated(tokens: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return drawn(2, tokens, width), drawn(2, width), drawn(2, width) + 1


def gated(tokens: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return drawn(2, tokens, width), drawn(2, tokens, width) + 1, drawn(2, width)


def loss(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 40) * 3, labels(rows, 40)


def head(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8), drawn(40, 8), labels(rows, 40)


def mild_head(rows: int) -> tuple[torch.Tensor, ...]:
    """Logits of a few units: where one class has nearly all the probability, the entropy's gradient
    is what rounding the logits leaves.
    """
    return drawn(rows, 8) / 3, drawn(40, 8), labels(rows, 40)


def two_heads(rows: int) -> tuple[torch.Tensor, ...]:
    return drawn(rows, 8) / 3, drawn(40, 8), drawn(rows, 6) / 3, drawn(40, 6)


def states(positions: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    return drawn(1, 2, positions, width), drawn(1, 1, positions, width)


def heads(positions: int) -> tuple[torch.Tensor, ...]:
    # a long sum is over the keys of few queries, or the queries of few keys
    return (
        drawn(1, 2, min(positions, 40), 16),
        drawn(1, 1, positions, 16),
        drawn(1, 1, positions, 16) + 1,
    )


def tables(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    return angle.cos()[None], angle.sin()[None]


def turned(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`f` with fp32 tables, as transformers makes them."""
    return lambda q, k: f(
        q,
        k,
        *(t.to(q.device, torch.promote_types(q.dtype, torch.float32)) for t in tables(q.shape[2])),
        **options,
    )


def mixture(tokens: int) -> tuple[torch.Tensor, ...]:
    """Four experts, two a token, one of which has no token."""
    index = torch.stack([torch.arange(tokens) * 7 % 3, (torch.arange(tokens) * 7 + 1) % 3], 1)
    return drawn(tokens, 8), index, drawn(tokens, 2) + 1, drawn(4, 16, 8), drawn(4, 8, 8)


def adapted(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`f` with fp32 adapters on both layers of every expert."""
    shapes = {"up_adapter": (16, 8), "down_adapter": (8, 8)}
    made = {
        name: (drawn(4, 3, columns), drawn(4, rows, 3)) for name, (rows, columns) in shapes.items()
    }

    def run(x: torch.Tensor, *others: torch.Tensor) -> Any:
        return f(
            x,
            *others,
            **{name: Adapter(a.to(x.device), b.to(x.device), 0.5) for name, (a, b) in made.items()},
            **options,
        )

    return run


def added(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight), total


def log_probs(**options: Any) -> Callable[..., Any]:
    return lambda h, w, t: linear_log_probs(
        h, w, t, outputs=("log_probs", "entropy", "logsumexp"), **options
    )[:3]


def log_probs_reference(**options: Any) -> Callable[..., Any]:
    return lambda h, w, t: linear_log_probs_reference(h, w, t, **options)[:3]


@dataclass
class Case:
    """inputs  rows (and of a formula a row its length) -> the arguments of one call"""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    contract: OpContract
    inputs: Callable[..., tuple[torch.Tensor, ...]]


def both(op: Any, reference: Any, contract: OpContract, inputs: Any, **options: Any) -> Case:
    return Case(partial(op, **options), partial(reference, **options), contract, inputs)


CASES = {
    "cross_entropy": both(cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss),
    "cross_entropy-every-option": both(
        cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss, num_items=7, **EVERY
    ),
    "cross_entropy-none": both(
        cross_entropy, cross_entropy_reference, CROSS_ENTROPY, loss, reduction="none"
    ),
    "linear_cross_entropy": both(
        linear_cross_entropy, linear_cross_entropy_reference, LINEAR_CROSS_ENTROPY, head
    ),
    "linear_cross_entropy-chunks": Case(
        partial(linear_cross_entropy, chunk=64, **EVERY),
        partial(linear_cross_entropy_reference, **EVERY),
        LINEAR_CROSS_ENTROPY,
        head,
    ),
    "linear_cross_entropy-none": both(
        linear_cross_entropy,
        linear_cross_entropy_reference,
        LINEAR_CROSS_ENTROPY,
        head,
        reduction="none",
        **EVERY,
    ),
    "linear_log_probs": Case(log_probs(), log_probs_reference(), LINEAR_LOG_PROBS, mild_head),
    "linear_log_probs-every-option": Case(
        log_probs(chunk=64, logit_scale=1.5, softcap=8.0, temperature=0.7),
        log_probs_reference(logit_scale=1.5, softcap=8.0, temperature=0.7),
        LINEAR_LOG_PROBS,
        mild_head,
    ),
    "linear_divergence": both(
        linear_divergence, linear_divergence_reference, LINEAR_DIVERGENCE, two_heads, beta=0.3
    ),
    "linear_divergence-chunks": Case(
        partial(linear_divergence, chunk=64, temperature=0.7, softcap=8.0),
        partial(linear_divergence_reference, temperature=0.7, softcap=8.0),
        LINEAR_DIVERGENCE,
        two_heads,
    ),
    "rms_norm": both(rms_norm, rms_norm_reference, RMS_NORM, norm),
    "rms_norm-gemma": both(rms_norm, rms_norm_reference, RMS_NORM, norm, unit_offset=True),
    "add_rms_norm": Case(add_rms_norm, added, ADD_RMS_NORM, added_norm),
    "silu_mul": both(silu_mul, silu_mul_reference, SILU_MUL, pair),
    "gelu_mul": both(gelu_mul, gelu_mul_reference, GELU_MUL, pair),
    "gelu_mul-tanh": both(gelu_mul, gelu_mul_reference, GELU_MUL, pair, approximate="tanh"),
    "gelu": both(gelu, gelu_reference, GELU, one),
    "gelu-tanh": both(gelu, gelu_reference, GELU, one, approximate="tanh"),
    "modulated_layer_norm": both(
        modulated_layer_norm, modulated_layer_norm_reference, MODULATED_LAYER_NORM, modulated
    ),
    "gated_residual": both(gated_residual, gated_residual_reference, GATED_RESIDUAL, gated),
    "experts-none": both(experts, experts_reference, EXPERTS, mixture),
    "experts": Case(adapted(experts), adapted(experts_reference), EXPERTS, mixture),
    "attention": both(attention, attention_reference, ATTENTION, heads),
    "rope": Case(turned(rope), turned(rope_reference), ROPE, states),
    "rope-interleaved": Case(
        turned(rope, interleaved=True), turned(rope_reference, interleaved=True), ROPE, states
    ),
}

# names of cases that are options of another's op
OPTIONAL = ("-none", "-chunks", "-tanh", "-gemma", "-interleaved")
