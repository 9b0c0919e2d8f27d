"""The op `linear_divergence` computes divergences between the distributions of two heads, with
gradients. T is the number of tokens, H and G are the hidden sizes, and V is the vocabulary size.

The logits of both heads are computed for one chunk of rows at a time. If the student's head is
frozen, forward computes the gradient of its hidden states from these logits. If the student's head
is trained, backward computes the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ShapeError, UsageError
from ..backend import (
    apply_function,
    arithmetic_dtype,
    autocast_off,
    product_dtype,
    refuse_second_derivative,
    uses_cpp,
    uses_triton,
)
from ..contract import OpContract
from ..cross_entropy.op import apply_rule
from ..cross_entropy.rows import LogitsSource
from ..cross_entropy.rule import LossRule
from ..library import library_op
from ..linear_cross_entropy.chunked import (
    Chunks,
    HeadGradient,
    cast_gradients,
    cast_head,
    check_head,
    default_chunk,
    gradient_factors,
    head_dtypes,
    largest_gradient,
    required_gradients,
    scale_to_dtype,
    shape_if,
    stored_gradient_dtype,
)
from ..linear_cross_entropy.op import reference_logits
from .rows import KERNELS, DivergenceParameters, divergences, divergences_cpp

LINEAR_DIVERGENCE = OpContract(
    "hidden: X[*n H], weight: W[V H], teacher_hidden: Y[*n G], teacher_weight: U[V G] ->"
    " fp32|fp64[*n]",
    inside="fp32",
    grads={"hidden": "X", "weight": "W"},
    autocast="fp32",
)
# five numbers: factor and softcap of the student's logits and of the teacher's logits, each divided
# by the temperature, and beta
RULES = "float[] rules"


def linear_divergence_reference(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """Computes `linear_divergence` in plain PyTorch, differentiated by autograd."""
    sides = (
        (hidden, weight, bias, logit_scale, softcap),
        (teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap),
    )
    log_probs = []
    for x, w, b, scale, cap in sides:
        rule = LossRule.from_options(ignore_index=-100, logit_scale=scale, softcap=cap)
        with autocast_off(x):
            log_probs.append(
                (apply_rule(reference_logits(x, w, b), rule) / temperature).log_softmax(-1)
            )
    s = log_probs[0]
    t = log_probs[1].detach()
    with autocast_off(hidden):
        return divergence(s, t, beta)


def divergence(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Computes the divergence of two tensors of log-probabilities [*n V]. Autograd can
    differentiate it.
    """
    if beta == 0.0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1.0:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def _choose_kernel(z: Tensor, teacher: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the function that computes the divergences: the C++ kernel, the Triton kernel, or
    plain PyTorch.
    """
    if uses_triton("linear_divergence", z):
        from . import triton

        return triton.divergences
    if uses_cpp(KERNELS, z, teacher):
        return divergences_cpp
    return divergences


class Heads(NamedTuple):
    """Computes the logits of both heads, `chunk` rows at a time.

    student, teacher  the logits of each model, in chunks of rows
    """

    student: Chunks
    teacher: Chunks
    parameters: DivergenceParameters
    compute: Any

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Any], rules: Sequence[float], chunk: int, gradients: bool
    ) -> Heads:
        """Creates a `Chunks` object for each of the two heads.

        tensors    hidden, weight and bias of the student, then of the teacher
        gradients  whether the gradient of the student's logits is computed
        """
        student_rule, teacher_rule = (
            LossRule(logit_scale=rules[i], softcap=rules[i + 1]) for i in (0, 2)
        )
        targets_T = torch.zeros(tensors[0].shape[0], dtype=torch.int64, device=tensors[0].device)
        student = Chunks(
            tensors[0], tensors[1], tensors[2], targets_T, student_rule, chunk, gradients
        )
        teacher = Chunks(tensors[3], tensors[4], tensors[5], targets_T, teacher_rule, chunk, False)
        return cls(
            student,
            teacher,
            DivergenceParameters(student_rule, teacher_rule, rules[4]),
            _choose_kernel(student.logits, teacher.logits),
        )

    def __iter__(
        self,
    ) -> Iterator[tuple[Any, Tensor, Tensor, Callable[..., tuple[Tensor, Tensor]]]]:
        """Yields (rows, x_NH, dlogits_NV, compute). `Chunks` describes the first three.
        `compute(upstream_N, want_entropy)` returns divergences and entropies of the rows, fp32[N]
        each (empty if not needed). If `upstream_N` is given, it also writes the gradient of the
        student's logits to dlogits_NV.
        """
        for (rows, x_NH, z_NV, g_NV), (_, y_NG, teacher_NV, _) in zip(self.student, self.teacher):
            sources: dict[str, Any] = {}
            if self.compute is divergences_cpp:
                heads = ((z_NV, x_NH, self.student), (teacher_NV, y_NG, self.teacher))
                sources["sources"] = tuple(
                    LogitsSource.from_product(z, x, head.weight_VH, head.bias_V)
                    for z, x, head in heads
                )
            yield (
                rows,
                x_NH,
                g_NV,
                partial(self.compute, z_NV, teacher_NV, self.parameters, g_NV, **sources),
            )


def empty_outputs(
    hidden_TH: Tensor, want_gradient: bool, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates divergences, entropies, and the gradient of the hidden rows. The entropies and the
    gradient are empty if forward does not compute them.
    """
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    tokens = hidden_TH.shape[:1]
    return (
        hidden_TH.new_empty(tokens, dtype=wide_dtype),
        hidden_TH.new_empty(shape_if(want_entropy, tokens), dtype=wide_dtype),
        hidden_TH.new_empty(shape_if(want_gradient, hidden_TH.shape), dtype=stored_dtype),
    )


def empty_gradients(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of hidden, weight and bias. The last two values of `rest` are
    booleans. They say whether the gradient of `hidden` and the gradient of `weight` are needed.
    """
    want_dhidden, want_dweight = rest[-2:]
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    classes = weight_VH.shape[:1]
    return (
        hidden_TH.new_empty(shape_if(want_dhidden, hidden_TH.shape), dtype=stored_dtype),
        weight_VH.new_empty(shape_if(want_dweight, weight_VH.shape), dtype=wide_dtype),
        weight_VH.new_empty(shape_if(bias_V is not None, classes), dtype=wide_dtype),
    )


_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight,"
    " Tensor? teacher_bias"
)


@library_op(
    f"linear_divergence_forward({_TENSORS}, {RULES}, int chunk, bool want_gradient, bool"
    " want_entropy) -> (Tensor, Tensor, Tensor)",
    fake=lambda hidden_TH, *rest: empty_outputs(hidden_TH, *rest[-2:]),
)
def _forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    teacher_TG: Tensor,
    weight_VG: Tensor,
    teacher_bias_V: Tensor | None,
    rules: Sequence[float],
    chunk: int,
    want_gradient: bool,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    divergence_T, entropy_T, dhidden_TH = empty_outputs(hidden_TH, want_gradient, want_entropy)
    heads = Heads.from_tensors(
        (hidden_TH, weight_VH, bias_V, teacher_TG, weight_VG, teacher_bias_V),
        rules,
        chunk,
        want_gradient,
    )
    pre_scale, post_scale = gradient_factors(
        heads.student.operand_dtype, hidden_TH.new_ones((), dtype=arithmetic_dtype(hidden_TH.dtype))
    )
    for rows, x_NH, g_NV, compute in heads:
        upstream_N = None
        if want_gradient:
            upstream_N = pre_scale.expand(x_NH.shape[0])
        divergence_T[rows], entropy_N = compute(upstream_N, want_entropy)
        if want_entropy:
            entropy_T[rows] = entropy_N
        if want_gradient:
            heads.student.write_dhidden(dhidden_TH, rows, g_NV, post_scale)
    return divergence_T, entropy_T, dhidden_TH


@library_op(
    f"linear_divergence_backward({_TENSORS}, {RULES}, int chunk, Tensor upstream, bool"
    " want_dhidden, bool want_dweight) -> (Tensor, Tensor, Tensor)",
    fake=empty_gradients,
)
def _backward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    teacher_TG: Tensor,
    weight_VG: Tensor,
    teacher_bias_V: Tensor | None,
    rules: Sequence[float],
    chunk: int,
    upstream_T: Tensor,
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dhidden_TH, dweight_VH, dbias_V = empty_gradients(
        hidden_TH, weight_VH, bias_V, want_dhidden, want_dweight
    )
    heads = Heads.from_tensors(
        (hidden_TH, weight_VH, bias_V, teacher_TG, weight_VG, teacher_bias_V), rules, chunk, True
    )
    upstream_size = largest_gradient(upstream_T)
    pre_scale, post_scale = gradient_factors(heads.student.operand_dtype, upstream_size)
    # fp16: brings the largest upstream gradient to `pre_scale`; `post_scale` undoes it
    upstream_factor: Tensor | float = 1.0
    if post_scale is not None:
        upstream_factor = pre_scale / upstream_size
    head = HeadGradient(dweight_VH, post_scale)
    if not heads.student.count:
        dweight_VH.zero_()
    dbias_V.zero_()
    for rows, x_NH, g_NV, compute in heads:
        compute(upstream_T[rows] * upstream_factor, False)
        if bias_V is not None:
            chunk_dbias_V = g_NV.sum(0, dtype=dbias_V.dtype)
            if post_scale is not None:
                chunk_dbias_V = chunk_dbias_V * post_scale
            dbias_V += chunk_dbias_V
        if want_dhidden:
            heads.student.write_dhidden(dhidden_TH, rows, g_NV, post_scale)
        if want_dweight:
            head.add(g_NV, x_NH)
    return dhidden_TH, dweight_VH, dbias_V


class LinearDivergence(torch.autograd.Function):
    """The autograd function of `linear_divergence`. It casts the tensors to the dtypes of the
    matrix products and switches autocast off.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        teacher: tuple[Tensor, Tensor, Tensor | None],
        rules: Sequence[float],
        dtypes: tuple[torch.dtype, torch.dtype],
        chunk: int,
        needs: tuple[bool, bool, bool],
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        gradient_in_forward = needs[0] and not (needs[1] or needs[2])
        with autocast_off(hidden_TH):
            operands = (
                *cast_head(dtypes[0], hidden_TH, weight_VH, bias_V),
                *cast_head(dtypes[1], *teacher),
            )
            divergence_T, entropy_T, dhidden_TH = _forward(
                *operands, rules, chunk, gradient_in_forward, want_entropy
            )
        ctx.rules = rules
        ctx.product_dtypes = dtypes
        ctx.chunk = chunk
        ctx.needs = needs
        ctx.gradient_in_forward = gradient_in_forward
        ctx.dtypes = head_dtypes(hidden_TH, weight_VH, bias_V)
        if gradient_in_forward:
            ctx.save_for_backward(dhidden_TH)
        else:
            ctx.save_for_backward(hidden_TH, weight_VH, bias_V, *teacher)
        ctx.mark_non_differentiable(entropy_T)
        return divergence_T, entropy_T

    @staticmethod
    def backward(ctx: Any, upstream_T: Tensor, _: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("linear_divergence")
        grads: list[Tensor | None] = [None, None, None]
        upstream_T = upstream_T.contiguous()
        if ctx.gradient_in_forward:
            grads[0] = scale_to_dtype(ctx.saved_tensors[0], upstream_T.unsqueeze(-1), ctx.dtypes[0])
        elif any(ctx.needs):
            saved = ctx.saved_tensors
            with autocast_off(upstream_T):
                operands = (
                    *cast_head(ctx.product_dtypes[0], *saved[:3]),
                    *cast_head(ctx.product_dtypes[1], *saved[3:]),
                )
                raw_grads = _backward(*operands, ctx.rules, ctx.chunk, upstream_T, *ctx.needs[:2])
                grads = cast_gradients(raw_grads, ctx.dtypes, ctx.needs)
        return (*grads, None, None, None, None, None, None)


def divergence_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    chunk: int | None = None,
    want_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes `linear_divergence` and the entropies of the student's distributions, fp32[*n]
    without a gradient. TRL logs these entropies.
    """
    check_head(hidden, weight, bias, chunk)
    check_head(teacher_hidden, teacher_weight, teacher_bias, chunk)
    if hidden.shape[:-1] != teacher_hidden.shape[:-1] or weight.shape[0] != teacher_weight.shape[0]:
        raise ShapeError(
            f"a student of {list(hidden.shape[:-1])} tokens and {weight.shape[0]} classes, a"
            f" teacher of {list(teacher_hidden.shape[:-1])} and {teacher_weight.shape[0]}: expected"
            " the same",
            code="SH001",
        )
    if not temperature > 0.0:
        raise UsageError(f"temperature is {temperature}: expected a positive number")
    if not 0.0 <= beta <= 1.0:
        raise UsageError(f"beta is {beta}: expected 0 to 1")
    dtypes = product_dtype(hidden, weight), product_dtype(teacher_hidden, teacher_weight)
    if chunk is None:
        chunk = default_chunk(hidden.shape[:-1].numel(), weight, dtypes, False)
    # c tanh(s x / c) / T equals (c / T) tanh((s / T) x / (c / T))
    rules = [
        LossRule.from_options(ignore_index=-100, logit_scale=scale, softcap=cap)
        for scale, cap in ((logit_scale, softcap), (teacher_logit_scale, teacher_softcap))
    ]
    values = [value / temperature for rule in rules for value in (rule.logit_scale, rule.softcap)]
    if teacher_bias is not None:
        teacher_bias = teacher_bias.detach()
    teacher_TG = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    teacher = (teacher_TG, teacher_weight.detach(), teacher_bias)
    divergence_T, entropy = apply_function(
        LinearDivergence,
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        teacher,
        [*values, beta],
        dtypes,
        chunk,
        required_gradients(hidden, weight, bias),
        want_entropy,
    )
    if want_entropy:
        entropy = entropy.reshape(hidden.shape[:-1])
    return divergence_T.reshape(hidden.shape[:-1]), entropy


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    logit_scale: float | None = None,
    softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Computes the per-token divergence between a student's next-token distribution and a
    teacher's, without storing all logits (tokens x vocabulary) of either.

    hidden          X[*n H]   the student's hidden states, any float dtype
    weight          W[V H]    the student's head, frozen or trainable
    teacher_hidden  Y[*n G]   the teacher's hidden states; tensors of the teacher get no gradient
    teacher_weight  U[V G]    the teacher's head, for the same vocabulary
    bias, teacher_bias  [V]
    ->              fp32[*n]  nats; fp64 for fp64 inputs
    beta            0: KL(teacher || student). 1: KL(student || teacher). Between: beta KL(t || m) +
                    (1 - beta) KL(s || m), where m = (1 - beta) s + beta t. Source: Agarwal et al.
                    2024; the definition is the same as in TRL's GKD
    temperature     divides the logits of both; the result is not multiplied by its square
    inside          each matrix product in autocast's dtype, or without autocast in the promoted
                    dtype of its operands; all other arithmetic in fp32
    grads           hidden: X   weight: W   bias: B   tokens may have different upstream gradients
    chunk           the number of rows whose logits exist at once; the default is computed from V
                    and a fixed number of bytes, and does not depend on the free memory
    Raises          ShapeError SH001; UsageError
    """
    return divergence_and_entropy(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        bias=bias,
        teacher_bias=teacher_bias,
        beta=beta,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap,
        chunk=chunk,
        want_entropy=False,
    )[0]
