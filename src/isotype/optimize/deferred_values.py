"""Values of single rows of deferred logits, without the logits: selected logits, logsumexp, means, the most likely class.

Preference losses use these: TRL's ORPO and CPO gather a logit, subtract a logsumexp and log a mean. T rows, H hidden, V vocabulary.
`x` is a `DeferredLogits` everywhere. Each function returns None where it needs the real logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..environment import planned
from ..ops import linear_log_probs
from ..ops.autocast import autocast_off, product_dtype, wide
from ..ops.backend import refuse_second_derivative
from ..ops.linear_cross_entropy.op import HeadOfClasses

# how often each op computed a value of deferred logits
answered: Counter[str] = Counter()
# never a valid target: a class that is out of range is an error, as in PyTorch's gather
NEVER_IGNORED = -(2**31)


class SelectedLogits(torch.autograd.Function):
    """fp32[T]: the product of each hidden row with the head's row of its class; no V-sized tensor but a trainable head's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, classes_T: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH, classes_T)
        ctx.dtype = dtype
        fp32 = wide(dtype)
        return (hidden_TH.to(dtype).to(fp32) * weight_VH[classes_T].to(dtype).to(fp32)).sum(-1)

    @staticmethod
    def backward(ctx: Any, dlogits_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("one logit a row", why="it is computed without the others", fix="isotype.restore(model)")
        hidden_TH, weight_VH, classes_T = ctx.saved_tensors
        g_T1 = dlogits_T.unsqueeze(-1)
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = (g_T1 * weight_VH[classes_T].to(ctx.dtype).to(g_T1.dtype)).to(hidden_TH.dtype)
        if ctx.needs_input_grad[1]:
            total_VH = torch.zeros(weight_VH.shape, dtype=g_T1.dtype, device=weight_VH.device)
            dweight = total_VH.index_add_(0, classes_T, g_T1 * hidden_TH.to(ctx.dtype).to(g_T1.dtype)).to(weight_VH.dtype)
        return dhidden, dweight, None, None


@contextmanager
def as_then(x: Any, *, used: bool) -> Iterator[Any]:
    """The recipe, once checked, with autocast and gradients as they were when the head was called.

    used a gradient may bypass the logits, which then have none themselves
    """
    r = x.recipe
    r.check()
    with planned.autocast(r.hidden.device.type, r.cast), torch.set_grad_enabled(r.grad and torch.is_grad_enabled()):
        if used and torch.is_grad_enabled():
            x.recipe.passed_by.a_loss = True
        yield r


def is_last(x: Any, dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, x.dim() - 1)


def one_class_a_row(x: Any, dim: Any, index: Any) -> Tensor | None:
    """index[*n 1] as classes[*n], where `gather` takes one logit of each row; None otherwise."""
    plain = is_last(x, dim) and isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == x.dim()
    return index.squeeze(-1) if plain and tuple(index.shape) == (*x.shape[:-1], 1) else None


def gather(x: Any, dim: Any = None, index: Any = None, **rest: Any) -> Tensor | None:
    classes = one_class_a_row(x, dim, index)
    if rest or classes is None or x.computed is not None:
        return None
    with as_then(x, used=True) as r:
        answered["selected_logits"] += 1
        dtype = product_dtype(r.hidden, r.weight)
        with autocast_off(r.hidden):
            flat = classes.reshape(-1)
            z = SelectedLogits.apply(r.hidden.reshape(-1, r.hidden.shape[-1]), r.weight, flat, dtype)
            if r.bias is not None:
                z = z + r.bias.to(dtype).to(z.dtype)[flat]
            z = z if r.pre == 1.0 else z * r.pre
            z = z if r.post is None else r.post * torch.tanh(z)
            return z.to(x.dtype).reshape(index.shape)  # type: ignore[no-any-return]  # z is an autograd function's result


def per_row(x: Any, classes: Tensor, output: str) -> Tensor:
    """One of `linear_log_probs`'s outputs, for each row: [*n]."""
    with as_then(x, used=output in ("log_probs", "logsumexp")) as r:
        answered["linear_log_probs"] += 1
        # post tanh(pre x) is the op's softcap tanh(scale x / softcap)
        scale, cap = (r.pre, None) if r.post is None else (r.pre * r.post, r.post)
        values = linear_log_probs(
            r.hidden, r.weight, classes, bias=r.bias, outputs=(output,), ignore_index=NEVER_IGNORED, logit_scale=scale, softcap=cap
        )
        made: Tensor = getattr(values, output)
        return made


def loses_nothing(x: Any, dtype: torch.dtype) -> bool:
    """Whether an op's fp32 arithmetic stands for deferred logits cast to `dtype`: to fp32, or back to the product's own dtype where nothing
    was done in between. Any other cast is made: a program's own fp16 logits have another loss, and an observer must see fp64 ones too."""
    as_made = x.recipe.pre == 1.0 and x.recipe.post is None
    return dtype == torch.float32 or (as_made and dtype == x.recipe.product)


def any_class(x: Any) -> Tensor:
    return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)


def logsumexp(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if rest or not is_last(x, dim) or x.computed is not None:
        return None
    made = per_row(x, any_class(x), "logsumexp").to(x.dtype)
    return made.unsqueeze(-1) if keepdim else made


def row_means(x: Any) -> Tensor | None:
    """fp32[*n]: the mean of each row's logits; under a softcap only without gradients."""
    r = x.recipe
    if r.post is not None:
        return None if x.requires_grad and torch.is_grad_enabled() else per_row(x, any_class(x), "mean_logits")
    with as_then(x, used=True):
        dtype = product_dtype(r.hidden, r.weight)
        fp32 = wide(dtype)
        with autocast_off(r.hidden):
            share_V = torch.full((r.weight.shape[0],), 1 / r.weight.shape[0], dtype=fp32, device=r.weight.device)
            made: Tensor = r.hidden.to(dtype).to(fp32) @ HeadOfClasses.apply(r.weight, share_V)
            made = made if r.bias is None else made + r.bias.to(fp32).mean()
            return made * float(r.pre)


def mean(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    """Of all logits, or of each row."""
    if rest or x.computed is not None or not (is_last(x, dim) or (dim is None and not keepdim)):
        return None
    rows = row_means(x)
    if rows is None:
        return None
    made = (rows.mean() if dim is None else rows).to(x.dtype)
    return made.unsqueeze(-1) if keepdim else made


def argmax(x: Any, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor | None:
    if rest or not is_last(x, dim) or x.computed is not None:
        return None
    made = per_row(x, any_class(x), "top1")
    return made.unsqueeze(-1) if keepdim else made
