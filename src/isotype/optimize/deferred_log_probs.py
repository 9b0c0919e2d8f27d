"""Deferred log-probabilities: `factor * log_softmax(logits)` of deferred logits, not yet computed.

Losses of users' own, and Trainer's label smoothing, write `log_softmax(...)`, perhaps negated, and then gather one class a row or sum a
row: both are known without the logits. Anything else gets the real log-probabilities, computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.autocast import autocast_dtype
from .deferred_tensor import DeferredTensor, in_graph
from .deferred_values import any_class, is_last, loses_nothing, one_class_a_row, per_row, row_means


class DeferredLogProbs(DeferredTensor):
    """See the module's docstring. Made by `log_softmax`. logits: a DeferredLogits; cast: log_softmax's own dtype, or None."""

    logits: Any
    factor: float
    cast: torch.dtype | None

    @staticmethod
    def __new__(cls, logits: Any, factor: float, cast: torch.dtype | None, dtype: torch.dtype) -> DeferredLogProbs:
        recipe = logits.recipe

        def make() -> DeferredLogProbs:
            made: DeferredLogProbs = Tensor._make_wrapper_subclass(cls, logits.shape, dtype=dtype, device=logits.device)
            return made

        def remake(*sources: Any) -> Tensor:
            return F.log_softmax(recipe.of(*sources).compute(), -1, dtype=cast).to(dtype) * factor

        made = in_graph(make, recipe.sources(), remake, grad=recipe.grad)
        made.logits, made.factor, made.cast, made.computed = logits, factor, cast, None
        return made

    def materialise(self, asked_by: str = "materialise") -> Tensor:
        """The real log-probabilities, computed once, with the graph that the logits have."""
        if self.computed is None:
            with torch.set_grad_enabled(self.logits.grad_was_on):
                made = F.log_softmax(self.logits.materialise(asked_by), -1, dtype=self.cast).to(self.dtype)
                self.computed = made if self.factor == 1.0 else made * self.factor
        return self.computed

    @classmethod
    def answered(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        rule = _RULES.get(func)
        first = args[0] if args else kwargs.get("input")
        if rule is not None and isinstance(first, DeferredLogProbs) and first.computed is None and first.logits.computed is None:
            return rule(*args, **kwargs)
        return None


def log_softmax(x: Any, dim: Any = None, *args: Any, dtype: torch.dtype | None = None, **rest: Any) -> DeferredLogProbs | None:
    """F.log_softmax's third positional argument is a stack level without a meaning here; Tensor's is a dtype."""
    if args or set(rest) - {"_stacklevel"} or not is_last(x, dim) or x.computed is not None:
        return None
    if dtype is not None and not loses_nothing(x, dtype):
        return None
    # PyTorch's own: autocast computes it in fp32
    narrow = x.dtype in (torch.bfloat16, torch.float16) and autocast_dtype(x.recipe.hidden) is not None
    x.recipe.passed_by.a_loss |= x.requires_grad and torch.is_grad_enabled()
    # logits of its own: a later write to x does not change what was computed before
    return DeferredLogProbs(type(x)(x.recipe), 1.0, dtype, dtype or (torch.float32 if narrow else x.dtype))


def _times(x: DeferredLogProbs, by: Any, **rest: Any) -> DeferredLogProbs | None:
    if rest or isinstance(by, bool) or not isinstance(by, int | float):
        return None
    return DeferredLogProbs(x.logits, x.factor * by, x.cast, x.dtype)


def _gather(x: DeferredLogProbs, dim: Any = None, index: Any = None, **rest: Any) -> Tensor | None:
    classes = one_class_a_row(x.logits, dim, index)
    if rest or classes is None:
        return None
    return (per_row(x.logits, classes, "log_probs") * x.factor).to(x.dtype).unsqueeze(-1)


def _sum(x: DeferredLogProbs, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, **rest: Any) -> Tensor | None:
    """Of each row: V (mean of the logits - logsumexp)."""
    means = None if rest or not is_last(x, dim) else row_means(x.logits)
    if means is None:
        return None
    made = x.factor * x.shape[-1] * (means - per_row(x.logits, any_class(x), "logsumexp"))
    made = made.to(dtype or x.dtype)
    return made.unsqueeze(-1) if keepdim else made


def _view(x: DeferredLogProbs, *shape: Any, **rest: Any) -> DeferredLogProbs | None:
    """Rows sliced or reshaped, as the logits' own rule gives them."""
    return _again(x, x.logits.reshape(*shape, **rest))


def _rows(x: DeferredLogProbs, index: Any) -> DeferredLogProbs | None:
    return _again(x, x.logits[index])


def _again(x: DeferredLogProbs, logits: Any) -> DeferredLogProbs | None:
    still = type(logits) is type(x.logits) and logits.shape[-1] == x.shape[-1]
    return DeferredLogProbs(logits, x.factor, x.cast, x.dtype) if still else None


def _nll_loss(
    x: DeferredLogProbs, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean",
) -> Tensor | None:  # fmt: skip
    if x.factor != 1.0 or weight is not None or size_average is not None or reduce is not None or x.dim() != 2:
        return None
    return F.cross_entropy(x.logits, target, ignore_index=ignore_index, reduction=reduction)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.gather, torch.gather), _gather),
    **dict.fromkeys((Tensor.sum, torch.sum), _sum),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _times),
    **dict.fromkeys((Tensor.neg, Tensor.__neg__, torch.neg), lambda x: _times(x, -1.0)),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    Tensor.__getitem__: _rows,
    F.nll_loss: _nll_loss,
    Tensor.requires_grad.__get__: lambda x: x.logits.requires_grad,  # type: ignore[attr-defined]  # a property to Python, an attribute to its annotation
}
