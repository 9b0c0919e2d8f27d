"""Defines the options with which the loss of a row of logits is computed (`LossRule`). Also
contains the formulas of this loss in plain PyTorch, for any device. The formulas process blocks of
rows and make no fp32 copy of all logits. T tokens, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import DtypeError, IsotypeError, ShapeError, UsageError
from ..backend import arithmetic_dtype, can_count_rows

Reduction = Literal["mean", "sum", "none"]
# the schema of `LossRule.arguments` in a `torch.library` op
RULE = "int ignore_index, float[] factors"
# (ignore_index, (label_smoothing, logit_scale, softcap, z_loss))
RuleArguments = tuple[int, tuple[float, float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """The options with which the loss of a row is computed.

    loss = (1 - label_smoothing) nll + label_smoothing mean_v(nll_v) + z_loss lse^2, where nll and
    lse are computed from softcap tanh(logit_scale x / softcap) of the logits x.

    Raises  UsageError for values out of range
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # 0 means no softcap
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise UsageError(f"label_smoothing is {self.label_smoothing}: expected 0 to 1")
        if self.softcap < 0.0:
            raise UsageError(
                f"softcap is {self.softcap}: expected a positive number, or None for none"
            )

    @classmethod
    def from_options(
        cls,
        *,
        ignore_index: int,
        logit_scale: float | None,
        softcap: float | None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> LossRule:
        """Creates a rule from the options of an op, where None means no scale or no softcap."""
        return cls(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=1.0 if logit_scale is None else float(logit_scale),
            softcap=0.0 if softcap is None else float(softcap),
            z_loss=z_loss,
        )

    @classmethod
    def from_arguments(cls, ignore_index: int, factors: Sequence[float]) -> LossRule:
        """Creates a rule from `arguments`."""
        label_smoothing, logit_scale, softcap, z_loss = factors
        return cls(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=logit_scale,
            softcap=softcap,
            z_loss=z_loss,
        )

    @property
    def arguments(self) -> RuleArguments:
        """Returns the fields of the rule in the form that `torch.library` accepts: numbers and
        lists of numbers.
        """
        return self.ignore_index, (
            self.label_smoothing,
            self.logit_scale,
            self.softcap,
            self.z_loss,
        )

    @property
    def cpp_arguments(self) -> tuple[int, float, float, float, float]:
        """Returns the settings of the loss as arguments for the C++ kernels, in the order that the
        kernels expect.
        """
        return self.ignore_index, self.label_smoothing, self.logit_scale, self.softcap, self.z_loss


# --- checks


def check_targets(targets: Tensor, rows: tuple[int, ...], classes: int, rule: LossRule) -> None:
    """Raises an error unless the targets fit logits of this shape.

    rows    the shape of the logits without their last dimension, `classes`
    Raises  DtypeError DT001, ShapeError SH001, and IsotypeError SH002 for a target out of range
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise DtypeError(
            f"targets are {targets.dtype}, declared int64 or int32",
            code="DT001",
            fix="targets.long()",
        )
    if tuple(targets.shape) != rows:
        raise ShapeError(
            f"targets are {list(targets.shape)} where logits {[*rows, classes]} need {list(rows)}",
            code="SH001",
        )
    # a fake tensor has no values
    if not isinstance(targets, FakeTensor):
        _check_range(targets, classes, rule.ignore_index)


def check_reduction(reduction: str, num_items: int | float | Tensor | None) -> None:
    """Raises UsageError for an unknown reduction, and if num_items is given but has no effect."""
    if reduction not in get_args(Reduction):
        raise UsageError(f"reduction is {reduction!r}: expected mean, sum or none")
    if num_items is not None and reduction != "mean":
        raise UsageError(
            f"num_items={num_items} has no effect with reduction={reduction!r}",
            fix='use reduction="mean"',
        )


def _check_range(targets: Tensor, classes: int, ignore_index: int) -> None:
    """Raises an error for targets out of range. On a CPU, the error message contains the first
    target that is out of range. On a GPU and in a compiled graph, a device-side assert checks the
    targets without a synchronisation.
    """
    is_valid = (targets == ignore_index) | ((targets >= 0) & (targets < classes))
    if targets.is_meta:
        return
    if torch.compiler.is_compiling() or targets.device.type != "cpu":
        torch._assert_async(
            is_valid.all(),
            f"SH002 a target is neither ignore_index ({ignore_index}) nor in 0..{classes - 1}",
        )
    elif not bool(is_valid.all()):
        invalid = targets[~is_valid].flatten()
        raise IsotypeError(
            f"{invalid.numel()} targets are out of range, the first is {int(invalid[0])}: "
            f"expected 0..{classes - 1} or ignore_index ({ignore_index})",
            code="SH002",
            fix=(
                "compare the tokenizer's length with the head's rows, and the label mask with"
                " ignore_index"
            ),
        )


# --- cross-entropy

# fp32 values per block: 1 MiB on a CPU (cores have an L2 cache of about 1 MiB). A GPU needs larger
# blocks to be busy
_BLOCK_ELEMENTS = {"cpu": 2**18}
_DEFAULT_BLOCK_ELEMENTS = 2**26


def wide_blocks(logits_TV: Tensor, rule: LossRule) -> Iterator[tuple[slice, Tensor]]:
    """For each block of rows, yields (the rows, their fp32 or fp64 logits after scale and softcap).
    All blocks share one buffer, since allocating new memory takes longer than the arithmetic
    (`benchmarks/ops.py`). The division into blocks depends only on shapes, so that results are
    reproducible.
    """
    tokens, columns = logits_TV.shape
    block_rows = max(
        1, _BLOCK_ELEMENTS.get(logits_TV.device.type, _DEFAULT_BLOCK_ELEMENTS) // max(1, columns)
    )
    buffer = torch.empty(
        min(block_rows, tokens),
        columns,
        dtype=arithmetic_dtype(logits_TV.dtype),
        device=logits_TV.device,
    )
    for start in range(0, tokens, block_rows):
        rows = slice(start, min(start + block_rows, tokens))
        z = buffer[: rows.stop - start].copy_(logits_TV[rows])
        if rule.logit_scale != 1.0:
            z.mul_(rule.logit_scale)
        if rule.softcap:
            z.div_(rule.softcap).tanh_().mul_(rule.softcap)
        yield rows, z


def exp_rows_(z: Tensor, targets: Tensor, rule: LossRule) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `z` by exp(z - max), and returns (row losses, logsumexp, sums of exp). The loss and
    the gradient both use this exp, so it is computed once.
    """
    ignored = targets == rule.ignore_index
    target_logit = z.gather(-1, targets.masked_fill(ignored, 0).long().unsqueeze(-1)).squeeze(-1)
    mean = z.mean(-1) if rule.label_smoothing else None
    maximum = z.amax(-1, keepdim=True)
    # a row of -inf has no finite maximum: its logsumexp is -inf, not nan
    z.sub_(maximum.masked_fill(maximum == -torch.inf, 0.0)).exp_()
    total = z.sum(-1)
    lse = total.log() + maximum.squeeze(-1)
    loss = (1 - rule.label_smoothing) * (lse - target_logit) + rule.z_loss * lse**2
    if mean is not None:
        loss += rule.label_smoothing * (lse - mean)
    return loss.masked_fill_(ignored, 0.0), lse, total


def gradient_rows_(
    p: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    rule: LossRule,
    classes: int,
    first_class: int = 0,
    total: Tensor | None = None,
) -> None:
    """Replaces `p` by the gradient of the logits.

    p            the softmax of the rows; with `total`, the softmax times each row's total
    classes      the size of the whole vocabulary
    first_class  the class of column 0, where the columns are a block of the vocabulary
    """
    factor = dloss * (1 + 2 * rule.z_loss * lse)
    p.mul_((factor if total is None else factor / total).unsqueeze(-1))
    if rule.label_smoothing:
        p.sub_((dloss * (rule.label_smoothing / classes)).unsqueeze(-1))
    _add_at_targets_(p, (rule.label_smoothing - 1) * dloss, targets - first_class)
    _backpropagate_rule_(p, logits, rule)


def _add_at_targets_(g: Tensor, values: Tensor, column: Tensor) -> None:
    """Adds one value to each row of `g`, in the column that `column` gives for this row. Columns
    outside `g` are skipped.
    """
    is_outside = (column < 0) | (column >= g.shape[-1])
    g.scatter_add_(
        -1,
        column.masked_fill(is_outside, 0).long().unsqueeze(-1),
        values.masked_fill(is_outside, 0.0).unsqueeze(-1),
    )


def _backpropagate_rule_(g: Tensor, logits: Tensor, rule: LossRule) -> None:
    """Converts the gradient `g` in place. Before the call, `g` is the gradient with respect to the
    logits to which scale and softcap were applied. After the call, it is the gradient with respect
    to the logits before scale and softcap.
    """
    if rule.softcap:
        # d tanh(u) = 1 - tanh(u)^2. tanh is recomputed from the logits, since softcaps are rare and
        # a second buffer would halve the size of blocks
        slope = torch.tanh(logits.to(g.dtype) * (rule.logit_scale / rule.softcap))
        g.mul_(1 - slope * slope)
    if rule.logit_scale != 1.0:
        g.mul_(rule.logit_scale)


def cross_entropy_forward(
    logits_TV: Tensor,
    targets_T: Tensor,
    rule: LossRule,
    out_TV: Tensor | None = None,
    dloss: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, logsumexp), each fp32[T]. The loss of an ignored row is 0.

    out_TV   if it is not None, the gradient of the logits is written to it. For this gradient, the
             upstream gradient of every row is `dloss`. `out_TV` may be `logits_TV` itself if the
             caller no longer needs the logits, and may have a narrower dtype
    """
    loss_T = torch.empty(
        logits_TV.shape[0], dtype=arithmetic_dtype(logits_TV.dtype), device=logits_TV.device
    )
    lse_T = torch.empty_like(loss_T)
    if dloss is not None:
        dloss_T = (
            dloss.to(loss_T.dtype)
            .expand_as(loss_T)
            .masked_fill(targets_T == rule.ignore_index, 0.0)
        )
    for rows, p in wide_blocks(logits_TV, rule):
        loss_T[rows], lse_T[rows], total = exp_rows_(p, targets_T[rows], rule)
        if out_TV is not None:
            gradient_rows_(
                p,
                logits_TV[rows],
                targets_T[rows],
                lse_T[rows],
                dloss_T[rows],
                rule,
                logits_TV.shape[1],
                total=total,
            )
            out_TV[rows] = p
    if out_TV is not None:
        zero_ignored_(out_TV, targets_T, rule)
    return loss_T, lse_T


def cross_entropy_backward(
    logits_TV: Tensor,
    targets_T: Tensor,
    lse_T: Tensor,
    dloss_T: Tensor,
    rule: LossRule,
    out_TV: Tensor,
    classes: int,
    first_class: int = 0,
) -> Tensor:
    """Writes the gradient of the logits to `out_TV` and returns it. `out_TV` may be `logits_TV`
    itself if the caller no longer needs the logits.
    """
    dloss_T = dloss_T.to(arithmetic_dtype(logits_TV.dtype)).masked_fill(
        targets_T == rule.ignore_index, 0.0
    )
    for rows, p in wide_blocks(logits_TV, rule):
        p.sub_(lse_T[rows].unsqueeze(-1)).exp_()
        gradient_rows_(
            p,
            logits_TV[rows],
            targets_T[rows],
            lse_T[rows],
            dloss_T[rows],
            rule,
            classes,
            first_class,
        )
        out_TV[rows] = p
    return zero_ignored_(out_TV, targets_T, rule)


def zero_ignored_(gradient_TV: Tensor, targets_T: Tensor, rule: LossRule) -> Tensor:
    """Sets the gradient of ignored rows to 0, even if their logits are not finite."""
    ignored_T = targets_T == rule.ignore_index
    if not can_count_rows(targets_T):
        return gradient_TV.masked_fill_(ignored_T.unsqueeze(-1), 0)
    # most batches have no ignored rows, and a mask would rewrite every row
    ignored_rows_N = ignored_T.nonzero().squeeze(-1)
    if ignored_rows_N.numel():
        return gradient_TV.index_fill_(0, ignored_rows_N, 0)
    return gradient_TV


# --- per-token values of N rows. z are the logits after scale and softcap, p = softmax(z), and H is
# the entropy:
#     d log p_target / dz_v = [v = target] - p_v
#     d H / dz_v = -p_v (log p_v + H)
#     d logsumexp / dz_v = p_v


class RequestedValues(NamedTuple):
    """States which optional outputs are computed. Log-probability and logsumexp are always
    computed.
    """

    entropy: bool
    log_sum_sq_probs: bool
    mean_logits: bool
    top1: bool


class RowValues(NamedTuple):
    """The values of N rows, each fp32[N] (top1 int64[N]). A tensor that was not requested is empty.

    log_probs         the log-probability of the row's target
    log_sum_sq_probs  the logarithm of the sum of the squared probabilities
    mean_logits       the mean of the logits over the vocabulary
    top1              the class with the largest logit
    """

    log_probs: Tensor
    logsumexp: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    top1: Tensor


class Upstream(NamedTuple):
    """The upstream gradients of each row, fp32[N]; None means zero. `entropy` is the entropy of
    each row, which is needed if dentropy is given.
    """

    dlog_probs: Tensor | None
    dlogsumexp: Tensor | None
    dentropy: Tensor | None
    entropy: Tensor | None


def allocate_row_values(
    rows: int, dtype: torch.dtype, device: torch.device, requested: RequestedValues
) -> RowValues:
    """Allocates outputs for `rows` rows. All tensors are filled with 0, except top1, which is
    filled with -1. Rows to which nothing is written later, such as ignored rows, keep these values.
    """

    def zeros(is_requested: bool) -> Tensor:
        return torch.zeros(rows if is_requested else 0, dtype=dtype, device=device)

    top1 = torch.full((rows if requested.top1 else 0,), -1, dtype=torch.int64, device=device)
    return RowValues(
        zeros(True),
        zeros(True),
        zeros(requested.entropy),
        zeros(requested.log_sum_sq_probs),
        zeros(requested.mean_logits),
        top1,
    )


def row_values(
    logits_NV: Tensor, targets_N: Tensor, rule: LossRule, requested: RequestedValues
) -> RowValues:
    """Computes the requested values of each row, such as its log-probability. No target may be
    ignore_index.
    """
    values = allocate_row_values(
        logits_NV.shape[0], arithmetic_dtype(logits_NV.dtype), logits_NV.device, requested
    )
    for rows, z in wide_blocks(logits_NV, rule):
        target_logit = z.gather(-1, targets_N[rows].long().unsqueeze(-1)).squeeze(-1)
        if requested.mean_logits:
            values.mean_logits[rows] = z.mean(-1)
        if requested.top1:
            values.top1[rows] = z.argmax(-1)
        maximum = z.amax(-1, keepdim=True)
        maximum = maximum.masked_fill_(maximum == -torch.inf, 0.0)
        z.sub_(maximum)
        exponential = z.exp()
        total = exponential.sum(-1)
        values.logsumexp[rows] = total.log() + maximum.squeeze(-1)
        values.log_probs[rows] = target_logit - values.logsumexp[rows]
        if requested.log_sum_sq_probs:
            values.log_sum_sq_probs[rows] = (exponential * exponential).sum(
                -1
            ).log() - 2 * total.log()
        if requested.entropy:
            # computed from z - max, which is of the entropy's order of magnitude: large logits then
            # cause no cancellation
            values.entropy[rows] = total.log() - (exponential * z.clamp_(min=-1e30)).sum(-1) / total
    return values


def row_value_gradients(
    logits_NV: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    upstream: Upstream,
    rule: LossRule,
    out_NV: Tensor,
    first_class: int = 0,
) -> Tensor:
    """Writes the gradient of the logits to `out_NV`, which may be `logits_NV` itself, and returns
    it. Column 0 contains the logits of the class `first_class`.

    An ignored row has inf as its logsumexp. Its gradient is 0, even if its logits are not finite.
    """
    for rows, z in wide_blocks(logits_NV, rule):
        log_p = z.sub_(lse_N[rows].unsqueeze(-1))
        constant = torch.zeros_like(lse_N[rows], dtype=z.dtype)
        if upstream.dlogsumexp is not None:
            constant += upstream.dlogsumexp[rows]
        if upstream.dlog_probs is not None:
            constant -= upstream.dlog_probs[rows]
        factor = constant.unsqueeze(-1)
        if upstream.dentropy is not None and upstream.entropy is not None:
            # p (log p + H) is 0 where p is 0, also for a class that is masked with -inf
            shifted = log_p.clamp(min=-1e30) + upstream.entropy[rows].unsqueeze(-1)
            factor = factor - upstream.dentropy[rows].unsqueeze(-1) * shifted
        g = log_p.exp_().mul_(factor)
        if upstream.dlog_probs is not None:
            _add_at_targets_(
                g, upstream.dlog_probs[rows].to(g.dtype), targets_N[rows] - first_class
            )
        _backpropagate_rule_(g, logits_NV[rows], rule)
        out_NV[rows] = g.masked_fill_((lse_N[rows] == torch.inf).unsqueeze(-1), 0.0)
    return out_NV
