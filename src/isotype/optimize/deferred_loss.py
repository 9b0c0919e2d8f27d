"""A summed loss of deferred logits, not yet computed, so that its divisor can be applied inside the op.

transformers, Trainer and our own loop divide a sum by the counted tokens of a whole accumulation window, which is not known in a single
micro-batch. Divided afterwards, its bf16 gradient is rounded a second time: 2.8e-3 of error where plain PyTorch has 2.3e-3. So the sum is
computed only at the next operation: a division or a product by a number goes into the op before it narrows (`num_items`); anything else
gets the real
sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .deferred_tensor import DeferredTensor, in_graph

Divisor: TypeAlias = int | float | Tensor


class DeferredLoss(DeferredTensor):
    """Stands for `compute(None)`, the sum; `compute(n)` is the sum divided by n, rounded once.

    sources  the tensors that it is made of
    remake   the function that makes the sum of other such tensors; both lists are emptied when the sum is spent
    """

    compute: Callable[[Divisor | None], Tensor]
    sources: list[Tensor | None]
    remake: list[Callable[..., Tensor]]

    @staticmethod
    def __new__(
        cls, compute: Callable[[Divisor | None], Tensor], dtype: torch.dtype, sources: list[Tensor | None], remake: Callable[..., Tensor]
    ) -> DeferredLoss:
        assert sources[0] is not None
        device = sources[0].device

        def make() -> DeferredLoss:
            made: DeferredLoss = Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=device)
            return made

        # the graph lives as long as somebody holds the sum: see `divided`
        compute_again = [remake]
        made = in_graph(make, sources, lambda *x: compute_again[0](*x), grad=True)
        made.compute, made.computed, made.sources, made.remake = compute, None, sources, compute_again
        return made

    def materialise(self, asked_by: str = "materialise") -> Tensor:
        """The real sum, computed once, with its graph: it was asked for where gradients were on."""
        if self.computed is None:
            with torch.enable_grad():
                self.computed = self.compute(None)
        return self.computed

    def divided(self, by: Divisor) -> Tensor:
        """The real quotient; the sum itself is from then on the quotient times `by`, so that no logit is computed twice."""
        with torch.enable_grad():
            quotient = self.compute(by)
            self.computed = quotient * by
        # it holds the hidden states, and whoever holds the sum through backward would hold them too: 128 MiB at 16,384 tokens of 4,096
        self.compute = _spent
        self.sources.clear()
        self.remake.clear()
        return quotient

    @classmethod
    def answered(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        rule = _RULES.get(func)
        if rule is not None and not kwargs and isinstance(args[0], DeferredLoss) and args[0].computed is None and torch.is_grad_enabled():
            return rule(*args)
        return None


def _spent(by: Divisor | None) -> Tensor:
    raise AssertionError("the sum is known already")


def _divided(x: DeferredLoss, by: Any) -> Tensor | None:
    plain = isinstance(by, Tensor) and type(by) is Tensor and by.dim() == 0 and not by.requires_grad and not by.is_complex()
    # PyTorch computes 0 / 0 and the like
    return x.divided(by) if plain or (_is_number(by) and by != 0) else None


def _times(x: DeferredLoss, by: Any) -> Tensor | None:
    return x.divided(1.0 / by) if _is_number(by) and by != 0 else None


def _as_is(x: DeferredLoss) -> DeferredLoss | None:
    return x if x.dtype == torch.float32 else None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _divided),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _times),
    Tensor.float: _as_is,
}
