"""Computes a value for each row of deferred logits without storing all logits. This value is the
logit of a given class, the logsumexp, the mean, or the most likely class.

Preference losses use these values. For example, TRL's ORPO and CPO losses gather a logit, subtract
the logsumexp, and write the mean of the logits to the log. T is the number of rows, H the hidden
size, and V the vocabulary size. `x` is always a `DeferredLogits`. Each function returns None if it
needs the real logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import linear_log_probs
from ..ops.backend import (
    arithmetic_dtype,
    autocast_dtype,
    autocast_off,
    product_dtype,
    refuse_second_derivative,
)
from .deferred_tensor import DeferredTensor, attach_to_graph

# how often each op computed a value of deferred logits
op_counts: Counter[str] = Counter()
# an ignore_index that no class has, so that a class out of range is an error as in PyTorch's gather
NEVER_IGNORED = -(2**31)


class SelectedLogits(torch.autograd.Function):
    """Computes fp32[T], the dot product of each hidden row with the row of the head for its class.
    If the head is trainable, its gradient is the only tensor with a dimension V.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, classes_T: Tensor, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, classes_T)
        ctx.dtype = dtype
        wide_dtype = arithmetic_dtype(dtype)
        return (
            hidden_TH.to(dtype).to(wide_dtype) * weight_VH[classes_T].to(dtype).to(wide_dtype)
        ).sum(-1)

    @staticmethod
    def backward(ctx: Any, dlogits_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("one logit a row")
        hidden_TH, weight_VH, classes_T = ctx.saved_tensors
        g_T1 = dlogits_T.unsqueeze(-1)
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = (g_T1 * weight_VH[classes_T].to(ctx.dtype).to(g_T1.dtype)).to(hidden_TH.dtype)
        if ctx.needs_input_grad[1]:
            total_VH = torch.zeros(weight_VH.shape, dtype=g_T1.dtype, device=weight_VH.device)
            dweight = total_VH.index_add_(
                0, classes_T, g_T1 * hidden_TH.to(ctx.dtype).to(g_T1.dtype)
            ).to(weight_VH.dtype)
        return dhidden, dweight, None, None


_BLOCK = 2**22  # number of elements of the head that are widened at a time


class HeadMean(torch.autograd.Function):
    """Computes fp32[H], the mean of the head's rows. The rows are summed in blocks, without an fp32
    copy of the whole head.
    """

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor) -> Tensor:
        ctx.shape = weight_VH.shape
        ctx.dtype = weight_VH.dtype
        total = weight_VH.new_zeros(weight_VH.shape[1], dtype=arithmetic_dtype(weight_VH.dtype))
        for rows in weight_VH.split(max(1, _BLOCK // weight_VH.shape[1])):
            total += rows.sum(0, dtype=total.dtype)
        return total / weight_VH.shape[0]

    @staticmethod
    def backward(ctx: Any, dmean_H: Tensor) -> Tensor:
        each_H: Tensor = (dmean_H / ctx.shape[0]).to(ctx.dtype)
        return each_H.expand(ctx.shape)


def is_last_dimension(x: Any, dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, x.dim() - 1)


def classes_per_row(x: Any, dim: Any, index: Any) -> Tensor | None:
    """Returns the class of each row, as int64[*n], if this is an index with which `gather` selects
    one logit of each row. Otherwise returns None.
    """
    is_supported = (
        is_last_dimension(x, dim)
        and isinstance(index, Tensor)
        and index.dtype == torch.int64
        and index.dim() == x.dim()
    )
    return index.squeeze(-1) if is_supported and tuple(index.shape) == (*x.shape[:-1], 1) else None


def gather(x: Any, dim: Any = None, index: Any = None, **rest: Any) -> Tensor | None:
    classes = classes_per_row(x, dim, index)
    if rest or classes is None or x.computed is not None:
        return None
    recipe = x.recipe
    with recipe.head_context():
        op_counts["selected_logits"] += 1
        dtype = product_dtype(recipe.hidden, recipe.weight)
        with autocast_off(recipe.hidden):
            flat_classes = classes.reshape(-1)
            z = SelectedLogits.apply(
                recipe.hidden.reshape(-1, recipe.hidden.shape[-1]),
                recipe.weight,
                flat_classes,
                dtype,
            )
            if recipe.bias is not None:
                z = z + recipe.bias.to(dtype).to(z.dtype)[flat_classes]
            if recipe.inner_factor != 1.0:
                z = z * recipe.inner_factor
            if recipe.outer_factor is not None:
                z = recipe.outer_factor * torch.tanh(z)
            return z.to(x.dtype).reshape(index.shape)  # type: ignore[no-any-return]  # the result of an autograd function is untyped


def compute_per_row(x: Any, output: str, classes: Tensor | None = None) -> Tensor:
    """Computes one output of `linear_log_probs` for each row, as [*n]. `classes` contains one class
    per row. It is needed only if the output depends on the class, as a log-probability does.
    """
    recipe = x.recipe
    if classes is None:
        classes = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    with recipe.head_context():
        op_counts["linear_log_probs"] += 1
        scale, softcap = recipe.scale_and_softcap
        values = linear_log_probs(
            recipe.hidden,
            recipe.weight,
            classes,
            bias=recipe.bias,
            outputs=(output,),
            ignore_index=NEVER_IGNORED,
            logit_scale=scale,
            softcap=softcap,
        )
        row_values: Tensor = getattr(values, output)
        return row_values


def is_lossless_cast(x: Any, dtype: torch.dtype) -> bool:
    """Whether deferred logits may stay deferred when they are cast to `dtype`. They may stay
    deferred if `dtype` is fp32, because the ops compute in fp32 in any case. They may also stay
    deferred if `dtype` is the dtype in which the head computes and no scale or softcap was applied.
    Any other cast computes the real logits. For example, a cast to fp16 rounds the logits, which
    changes the loss.
    """
    is_unscaled = x.recipe.inner_factor == 1.0 and x.recipe.outer_factor is None
    return dtype == torch.float32 or (is_unscaled and dtype == x.recipe.head_dtype)


def logsumexp(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if rest or not is_last_dimension(x, dim) or x.computed is not None:
        return None
    values = compute_per_row(x, "logsumexp").to(x.dtype)
    return values.unsqueeze(-1) if keepdim else values


def row_means(x: Any) -> Tensor | None:
    """Computes fp32[*n], the mean of the logits of each row. With a softcap, this is only possible
    if no gradients are needed.
    """
    recipe = x.recipe
    if recipe.outer_factor is not None:
        if x.requires_grad and torch.is_grad_enabled():
            return None
        return compute_per_row(x, "mean_logits")
    with recipe.head_context():
        dtype = product_dtype(recipe.hidden, recipe.weight)
        wide_dtype = arithmetic_dtype(dtype)
        with autocast_off(recipe.hidden):
            means: Tensor = recipe.hidden.to(dtype).to(wide_dtype) @ HeadMean.apply(
                recipe.weight
            ).to(wide_dtype)
            means = means if recipe.bias is None else means + recipe.bias.to(wide_dtype).mean()
            return means * float(recipe.inner_factor)


def mean(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    """Computes the mean of all logits, or of each row."""
    if (
        rest
        or x.computed is not None
        or not (is_last_dimension(x, dim) or (dim is None and not keepdim))
    ):
        return None
    rows = row_means(x)
    if rows is None:
        return None
    values = (rows.mean() if dim is None else rows).to(x.dtype)
    return values.unsqueeze(-1) if keepdim else values


def argmax(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    if rest or not is_last_dimension(x, dim) or x.computed is not None:
        return None
    classes = compute_per_row(x, "top1")
    return classes.unsqueeze(-1) if keepdim else classes


# --- deferred log-probabilities: `factor * log_softmax(logits)`, not yet computed. Users' losses
# and Trainer's label smoothing call `log_softmax(...)`, perhaps negate it, and then gather one
# class per row or sum each row. Both are computed without the logits. Any other function gets the
# real log-probabilities, which are computed once


class DeferredLogProbs(DeferredTensor):
    """Log-probabilities that are not computed yet. `log_softmax` creates them.

    logits  a DeferredLogits
    factor  the number by which the log-probabilities are multiplied
    cast    the `dtype` argument of log_softmax, or None
    """

    logits: Any
    factor: float
    cast: torch.dtype | None

    @staticmethod
    def __new__(
        cls, logits: Any, factor: float, cast: torch.dtype | None, dtype: torch.dtype
    ) -> DeferredLogProbs:
        recipe = logits.recipe

        def make() -> DeferredLogProbs:
            wrapper: DeferredLogProbs = Tensor._make_wrapper_subclass(
                cls, logits.shape, dtype=dtype, device=logits.device
            )
            return wrapper

        def remake(*sources: Any) -> Tensor:
            return (
                F.log_softmax(recipe.with_sources(*sources).compute(), -1, dtype=cast).to(dtype)
                * factor
            )

        log_probs = attach_to_graph(make, recipe.sources(), remake, grad=recipe.is_grad_enabled)
        log_probs.logits = logits
        log_probs.factor = factor
        log_probs.cast = cast
        log_probs.computed = None
        return log_probs

    def materialise(self, function_name: str = "materialise") -> Tensor:
        """Computes the real log-probabilities once. If the logits have an autograd graph, the
        log-probabilities are part of it.
        """
        if self.computed is None:
            with torch.set_grad_enabled(self.logits.recipe.is_grad_enabled):
                log_probs = F.log_softmax(
                    self.logits.materialise(function_name), -1, dtype=self.cast
                ).to(self.dtype)
                self.computed = log_probs if self.factor == 1.0 else log_probs * self.factor
        return self.computed

    @classmethod
    def compute_without_values(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        rule = _RULES.get(func)
        first = args[0] if args else kwargs.get("input")
        if (
            rule is None
            or not isinstance(first, DeferredLogProbs)
            or first.computed is not None
            or first.logits.computed is not None
        ):
            return None
        return rule(*args, **kwargs)


def log_softmax(
    x: Any, dim: Any = None, *args: Any, dtype: torch.dtype | None = None, **rest: Any
) -> DeferredLogProbs | None:
    """Returns the log-softmax of deferred logits, which is deferred too. A third positional
    argument is not supported, because it is a stack level in F.log_softmax and a dtype in
    Tensor.log_softmax.
    """
    if (
        args
        or set(rest) - {"_stacklevel"}
        or not is_last_dimension(x, dim)
        or x.computed is not None
    ):
        return None
    if dtype is not None and not is_lossless_cast(x, dtype):
        return None
    # as in PyTorch, autocast gives it in fp32
    is_narrow = (
        x.dtype in (torch.bfloat16, torch.float16) and autocast_dtype(x.recipe.hidden) is not None
    )
    # a copy of the deferred logits, because a later write to x must not change them
    return DeferredLogProbs(
        type(x)(x.recipe), 1.0, dtype, dtype or (torch.float32 if is_narrow else x.dtype)
    )


def _scale(x: DeferredLogProbs, factor: Any, **rest: Any) -> DeferredLogProbs | None:
    if rest or isinstance(factor, bool) or not isinstance(factor, int | float):
        return None
    return DeferredLogProbs(x.logits, x.factor * factor, x.cast, x.dtype)


def _gather(x: DeferredLogProbs, dim: Any = None, index: Any = None, **rest: Any) -> Tensor | None:
    classes = classes_per_row(x.logits, dim, index)
    if rest or classes is None:
        return None
    return (compute_per_row(x.logits, "log_probs", classes) * x.factor).to(x.dtype).unsqueeze(-1)


def _sum(
    x: DeferredLogProbs,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **rest: Any,
) -> Tensor | None:
    """Computes the sum of the log-probabilities of each row, which is V * (mean of the logits -
    logsumexp).
    """
    means = None if rest or not is_last_dimension(x, dim) else row_means(x.logits)
    if means is None:
        return None
    sums = x.factor * x.shape[-1] * (means - compute_per_row(x.logits, "logsumexp"))
    sums = sums.to(dtype or x.dtype)
    return sums.unsqueeze(-1) if keepdim else sums


def _select_rows(function: Callable[..., Any]) -> Callable[..., DeferredLogProbs | None]:
    """Returns a function that slices or reshapes deferred log-probabilities. It does this by
    calling `function` with the deferred logits.
    """

    def rule(x: DeferredLogProbs, *args: Any, **kwargs: Any) -> DeferredLogProbs | None:
        logits = function(x.logits, *args, **kwargs)
        keeps_classes = type(logits) is type(x.logits) and logits.shape[-1] == x.shape[-1]
        if keeps_classes:
            return DeferredLogProbs(logits, x.factor, x.cast, x.dtype)
        return None

    return rule


def _nll_loss(
    x: DeferredLogProbs,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:
    if (
        x.factor != 1.0
        or weight is not None
        or size_average is not None
        or reduce is not None
        or x.dim() != 2
    ):
        return None
    return F.cross_entropy(x.logits, target, ignore_index=ignore_index, reduction=reduction)


# function of PyTorch -> what it does with deferred log-probabilities
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.gather, torch.gather), _gather),
    **dict.fromkeys((Tensor.sum, torch.sum), _sum),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _scale),
    **dict.fromkeys((Tensor.neg, Tensor.__neg__, torch.neg), lambda x: _scale(x, -1.0)),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _select_rows(Tensor.reshape)),
    Tensor.__getitem__: _select_rows(Tensor.__getitem__),
    F.nll_loss: _nll_loss,
    Tensor.requires_grad.__get__: lambda x: x.logits.requires_grad,  # type: ignore[attr-defined]  # a property to Python, an attribute to its annotation
}
