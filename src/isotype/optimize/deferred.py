"""Deferred logits: a tensor subclass for logits that are computed only when needed. The logits are
`outer_factor * tanh(inner_factor * (hidden @ weight.T + bias))`, or without a softcap
`inner_factor * (hidden @ weight.T + bias)`.

`linear_cross_entropy` computes their cross-entropy. A single logit, the logsumexp or a
log-probability of each row is computed without storing all logits (`deferred_values`). The result
is still deferred after a scale, a softcap, a lossless cast, a reshape or a selection of rows. Any
other operation needs the values. They are then computed once and stored, and autograd records this
computation.

The tensor has the shape, dtype and device of the logits, but no memory. Its values can be read
until an optimizer changes the head's weight. To keep the values, use `logits.detach().clone()`.
"""

from __future__ import annotations

import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..environment import planned_device
from ..errors import IsotypeError
from ..ops import linear_cross_entropy
from ..ops.backend import autocast_dtype, autocast_off, product_dtype
from ..ops.widened_products import differentiable_linear
from .deferred_tensor import DeferredTensor, attach_to_graph, count_changes
from .deferred_values import (
    argmax,
    gather,
    is_lossless_cast,
    log_softmax,
    logsumexp,
    mean,
    op_counts,
)

# code location -> how often a training step computed deferred logits there
materialisations: Counter[str] = Counter()


# functions that need the tensor's own memory or graph; so do functions whose name ends in one
# underscore
_IN_PLACE = {
    "__setitem__",
    *(
        f"__i{op}__"
        for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    ),
}
# methods that register a hook
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_VIEWS = {
    *(
        Tensor.detach,
        torch.detach,
        Tensor.view,
        Tensor.reshape,
        torch.reshape,
        Tensor.contiguous,
        Tensor.__getitem__,
    ),
    *(Tensor.flatten, torch.flatten),
}  # functions whose result may share memory with their argument


@dataclass(frozen=True)
class Recipe:
    """Describes how the logits are computed. T represents the leading dimensions, H is the hidden
    size, and V the vocabulary size.
    """

    hidden: Tensor  # X[*n H], with its autograd graph
    weight: Tensor  # W[V H]
    bias: Tensor | None
    source: Tensor  # the head's weight, of which `weight` may be a detached view
    weight_changes: tuple[int, int]  # `count_changes(source)` when the head was called
    is_grad_enabled: bool  # whether gradients were enabled at that time
    autocast_dtype: torch.dtype | None  # autocast's dtype at that time
    head_dtype: torch.dtype  # the dtype of the head's product
    dtype: torch.dtype  # the current dtype of the logits
    inner_factor: float = 1.0
    outer_factor: float | None = None  # None without a softcap
    # the number by which a summed loss will be divided, if the forward got it
    num_items: int | Tensor | None = None
    # FSDP's hooks, called when backward reaches the logits or their loss; all tensors that are
    # derived from these logits share them
    backward_hooks: OrderedDict[int, Callable[[Any], Any]] = field(default_factory=OrderedDict)

    def scaled(self, factor: float) -> Recipe:
        if self.outer_factor is None:
            return replace(self, inner_factor=self.inner_factor * factor)
        return replace(self, outer_factor=self.outer_factor * factor)

    @property
    def scale_and_softcap(self) -> tuple[float, float | None]:
        """Returns the arguments `scale` and `softcap` of the ops. outer tanh(inner x) equals
        softcap tanh(scale x / softcap).
        """
        if self.outer_factor is None:
            return (self.inner_factor, None)
        return (self.inner_factor * self.outer_factor, self.outer_factor)

    def sources(self) -> list[Tensor | None]:
        return [self.hidden, self.weight, self.bias]

    def with_sources(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Recipe:
        """Returns a copy of this `Recipe` in which `hidden`, `weight` and `bias` are replaced by
        these tensors.
        """
        return replace(self, hidden=hidden, weight=weight, bias=bias)

    def check(self) -> None:
        if (
            self.weight.numel()
            and not self.weight.is_meta
            and not self.weight.untyped_storage().size()
        ):
            raise IsotypeError(
                "the head's weight is sharded, and its memory was freed before the logits were"
                " computed",
                fix=(
                    "fully_shard(..., reshard_after_forward=False) for the FSDP unit that has the"
                    " head"
                ),
            )
        if count_changes(self.source) != self.weight_changes:
            raise IsotypeError(
                "these logits were not computed before the head's weight changed, and now"
                " cannot be",
                fix=(
                    "keep outputs.logits.detach().clone(), or read outputs.logits, before what"
                    " changes the weights: optimizer.step(), also in a hook of backward(), or your"
                    " own code"
                ),
            )

    @contextmanager
    def head_context(self) -> Iterator[None]:
        """Checks that the weight has not changed since the head was called. Within this block,
        autocast and gradient mode are the same as when the head was called.
        """
        self.check()
        with (
            planned_device.autocast(self.hidden.device.type, self.autocast_dtype),
            torch.set_grad_enabled(self.is_grad_enabled and torch.is_grad_enabled()),
        ):
            yield

    def compute(self) -> Tensor:
        """Computes the real logits in the dtypes of the model's own computation. The result has an
        autograd graph if the head was called without `torch.no_grad`.
        """
        with (
            torch.inference_mode(self.hidden.is_inference()),
            torch.set_grad_enabled(self.is_grad_enabled),
        ):
            with self.head_context():
                x = differentiable_linear(self.hidden, self.weight, self.bias)
            with autocast_off(x):
                if torch.finfo(self.dtype).bits > torch.finfo(x.dtype).bits:
                    x = x.to(self.dtype)
                if self.inner_factor != 1.0:
                    x = x * self.inner_factor
                if self.outer_factor is not None:
                    x = self.outer_factor * torch.tanh(x)
                return self._add_backward_hooks(x.to(self.dtype))

    def loss(self, targets: Tensor, **options: Any) -> Tensor:
        """Computes the cross-entropy with the scale and the softcap of these logits. `options` are
        further arguments of `cross_entropy`.
        """
        scale, cap = self.scale_and_softcap
        with self.head_context():
            op_counts["linear_cross_entropy"] += 1
            loss: Tensor = linear_cross_entropy(
                self.hidden,
                self.weight,
                targets,
                bias=self.bias,
                logit_scale=scale,
                softcap=cap,
                num_items=self.num_items if options.get("reduction") == "sum" else None,
                **options,
            )
            return self._add_backward_hooks(loss)

    def _add_backward_hooks(self, result: Tensor) -> Tensor:
        """Registers the backward hooks on a tensor that was computed from the logits."""
        if result.requires_grad:
            for hook in self.backward_hooks.values():
                result.register_hook(partial(_call_hook, hook))
        return result


def _call_hook(hook: Callable[[Any], Any], gradient: Tensor) -> None:
    """Calls FSDP's hook and ignores its result, because the hook returns the gradient unchanged."""
    hook(gradient)


class DeferredLogits(DeferredTensor):
    """Logits that are not computed yet (see the module's docstring). `defer` creates them."""

    recipe: Recipe
    # names of the functions that have written in place; one list is shared by all deferred logits
    # that would share memory
    in_place_writers: list[str]

    @staticmethod
    def __new__(cls, recipe: Recipe) -> DeferredLogits:
        shape = (*recipe.hidden.shape[:-1], recipe.weight.shape[0])

        def make() -> DeferredLogits:
            wrapper: DeferredLogits = Tensor._make_wrapper_subclass(
                cls, shape, dtype=recipe.dtype, device=recipe.hidden.device
            )
            return wrapper

        logits = attach_to_graph(
            make,
            recipe.sources(),
            lambda *sources: recipe.with_sources(*sources).compute(),
            grad=recipe.is_grad_enabled,
        )
        logits.recipe = recipe
        logits.computed = None
        logits.in_place_writers = []
        return logits

    def materialise(self, function_name: str = "materialise") -> Tensor:
        """Computes the real tensor once. In a training step, it also stores the line of code that
        needed the tensor, for a report.
        """
        if self.computed is None:
            self.check()
            if torch.is_grad_enabled() and self.recipe.hidden.requires_grad:
                materialisations[f"{function_name} at {_calling_line()}"] += 1
            self.computed = self.recipe.compute()
        return self.computed

    def check(self) -> None:
        """Raises IsotypeError if these logits are not computed yet, and other logits that share
        memory with them were changed in place.
        """
        if self.computed is None and self.in_place_writers:
            raise IsotypeError(
                f"{self.in_place_writers[-1]}() on logits from which these were sliced or reshaped, or that"
                " were made from these",
                fix="logits.clone() before what changes them in place, or isotype.restore(model)",
            )

    @classmethod
    def compute_without_values(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        rule = _RULES.get(func)
        first = args[0] if args else kwargs.get("input")
        if rule is not None and isinstance(first, DeferredLogits):
            first.check()
            result = rule(*args, **kwargs)
            if isinstance(result, DeferredLogits) and result is not first and func in _VIEWS:
                result.in_place_writers = first.in_place_writers
            if result is not None:
                return result
        if _needs_memory(func, kwargs):
            _materialise_before_write(
                getattr(func, "__name__", str(func)), (*args, *kwargs.values())
            )
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as the C function that stands in its place, without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            _materialise_before_write(str(func), (*args, *(kwargs or {}).values()))
        return super().__torch_dispatch__(func, types, args, kwargs)


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, items: int | Tensor | None = None
) -> DeferredLogits:
    """Returns `F.linear(hidden, weight, bias)` as deferred logits.

    items  the number by which a summed loss will be divided, if it is known
    """
    is_grad_enabled = torch.is_grad_enabled()
    logits_dtype = product_dtype(hidden, weight)
    cast_dtype = autocast_dtype(hidden)
    return DeferredLogits(
        Recipe(
            hidden,
            weight,
            bias,
            weight,
            count_changes(weight),
            is_grad_enabled,
            cast_dtype,
            logits_dtype,
            logits_dtype,
            num_items=items,
        )
    )


def _needs_memory(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in _IN_PLACE
        or name in _HOOKS
        or kwargs.get("out") is not None
    )


def _materialise_before_write(name: str, arguments: tuple[Any, ...]) -> None:
    """Computes deferred logits before they are changed in place. If a view of these logits is not
    computed yet, it raises an error later, when its values are needed. Raises an error if a
    gradient hook is registered on deferred logits.
    """
    for x in arguments:
        if isinstance(x, DeferredLogits):
            if name in _HOOKS:
                raise IsotypeError(
                    f"{name}() on deferred logits, which have no gradient of their own",
                    fix="isotype.restore(model)",
                )
            x.materialise(name)
            x.in_place_writers.append(name)


def _calling_line() -> str:
    """Returns the innermost running line of code outside of torch, this package and the observer."""
    for frame in reversed(traceback.extract_stack()):
        if not any(
            part in frame.filename
            for part in ("/torch/", "/isotype/optimize/deferred", "/isotype/observe/")
        ):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return "an unknown line"


# --- rules for functions of deferred logits: each returns a result, or None if the real logits are
# needed


def _replace_recipe(x: DeferredLogits, **changes: Any) -> DeferredLogits | None:
    # if the real tensor was computed already, later operations should use the real tensor
    if x.computed is not None:
        return None
    return DeferredLogits(replace(x.recipe, **changes))


# PyTorch calls this argument `other`
def _scale(x: Any, other: Any, **rest: Any) -> DeferredLogits | None:
    if (
        rest
        or isinstance(other, bool)
        or not isinstance(other, (int, float))
        or x.computed is not None
    ):
        return None
    return DeferredLogits(x.recipe.scaled(float(other)))


def _divide(x: Any, other: Any, **rest: Any) -> DeferredLogits | None:
    if isinstance(other, int | float) and other:
        return _scale(x, 1.0 / other, **rest)
    return None


def _tanh(x: DeferredLogits) -> DeferredLogits | None:
    """Returns None for a second tanh, which cannot be deferred. The op rejects a negative softcap."""
    if x.recipe.outer_factor is not None:
        return None
    return _replace_recipe(x, outer_factor=1.0)


def _clone(x: DeferredLogits, **rest: Any) -> DeferredLogits | None:
    """If the clone has an autograd graph, it stays deferred, because DDP clones the output of every
    forward. Without an autograd graph, the clone is computed at once, because the caller wants to
    keep its values.
    """
    if rest or not _requires_grad(x):
        return None
    return _replace_recipe(x)


def _contiguous(x: DeferredLogits, **rest: Any) -> DeferredLogits | None:
    if rest:
        return None
    return _replace_recipe(x)


def _cast(dtype: torch.dtype) -> Callable[..., DeferredLogits | None]:
    def cast(x: DeferredLogits, **rest: Any) -> DeferredLogits | None:
        if rest:
            return None
        if x.dtype == dtype:
            return x
        if is_lossless_cast(x, dtype):
            return _replace_recipe(x, dtype=dtype)
        return None

    return cast


def _to(x: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits | None:
    if len(args) == 1 and not kwargs:
        dtype = args[0]
    elif not args and set(kwargs) == {"dtype"}:
        dtype = kwargs.get("dtype")
    else:
        dtype = None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return _cast(dtype)(x)
    return None


def _detach(x: DeferredLogits) -> DeferredLogits | None:
    recipe = x.recipe
    bias = None if recipe.bias is None else recipe.bias.detach()
    return _replace_recipe(
        x, hidden=recipe.hidden.detach(), weight=recipe.weight.detach(), bias=bias
    )


def _view(x: DeferredLogits, *shape: Any, **rest: Any) -> DeferredLogits | None:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        sizes = tuple(shape[0])
    else:
        sizes = shape
    vocabulary = x.recipe.weight.shape[0]
    if (
        rest
        or len(sizes) < 2
        or not all(isinstance(size, int) for size in sizes)
        or sizes[-1] != vocabulary
    ):
        return None
    return _replace_recipe(
        x, hidden=x.recipe.hidden.reshape(*sizes[:-1], x.recipe.hidden.shape[-1])
    )


def _select_rows(x: DeferredLogits, index: Any) -> DeferredLogits | None:
    if isinstance(index, Tensor):
        return _select_by_tensor(x, index)
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in (slice, int) for part in parts):
        return None
    dims = x.recipe.hidden.dim()
    # expand an ellipsis as Python does, to find the index of the vocabulary dimension
    if Ellipsis in parts:
        ellipsis_index = parts.index(Ellipsis)
        parts = (
            *parts[:ellipsis_index],
            *[slice(None)] * (dims - len(parts) + 1),
            *parts[ellipsis_index + 1 :],
        )
    if (
        len(parts) > dims
        or (len(parts) == dims and parts[-1] != slice(None))
        or sum(type(part) is int for part in parts) > dims - 2
    ):
        return None
    return _replace_recipe(x, hidden=x.recipe.hidden[parts])


def _select_by_tensor(x: DeferredLogits, index: Tensor) -> DeferredLogits | None:
    """Selects rows by a mask of the leading dimensions, or by indices of the first dimension."""
    leading = x.recipe.hidden.dim() - 1
    is_supported = type(index) is Tensor and (
        index.dim() <= leading
        if index.dtype == torch.bool
        else index.dtype == torch.int64 and index.dim()
    )
    if is_supported and leading:
        return _replace_recipe(x, hidden=x.recipe.hidden[index])
    return None


def _unbind(x: DeferredLogits, dim: int = 0, **rest: Any) -> tuple[Tensor, ...] | None:
    """Splits the logits along the first dimension. Iterating over the logits calls this function
    too.
    """
    if rest or dim != 0 or x.dim() < 3 or x.computed is not None:
        return None
    return tuple(x[i] for i in range(len(x)))


def _flatten(
    x: DeferredLogits, start_dim: int = 0, end_dim: int = -1, **rest: Any
) -> DeferredLogits | None:
    dims = x.dim()
    start, end = (d + dims if d < 0 else d for d in (start_dim, end_dim))
    if rest or not 0 <= start <= end < dims - 1:
        return None
    return _replace_recipe(x, hidden=x.recipe.hidden.flatten(start, end))


def _index_select(
    x: DeferredLogits, dim: Any = None, index: Any = None, **rest: Any
) -> DeferredLogits | None:
    is_supported = (
        not rest and dim == 0 and isinstance(index, Tensor) and x.recipe.hidden.dim() == 2
    )
    if is_supported:
        return _replace_recipe(x, hidden=x.recipe.hidden.index_select(0, index))
    return None


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    is_supported = (
        weight is None and size_average is None and reduce is None and isinstance(target, Tensor)
    )
    if (
        not is_supported
        or input.dim() != 2
        or target.dim() != 1
        or target.dtype != torch.int64
        or input.computed is not None
    ):
        return None
    recipe = input.recipe
    # as in PyTorch, autocast gives this loss in fp32
    is_narrow = input.dtype in (torch.bfloat16, torch.float16)
    if is_narrow and autocast_dtype(recipe.hidden) is not None:
        dtype = torch.float32
    else:
        dtype = input.dtype
    loss: Tensor = recipe.loss(
        target, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return loss.to(dtype)


def _register_hook(x: DeferredLogits, hook: Any) -> RemovableHandle | None:
    """Lets FSDP register its hook on deferred logits. The hook gathers the weights of an FSDP unit
    before the backward of this unit. It does not read the gradient, so the logits need not be
    computed for it.
    """
    is_fsdp_hook = type(getattr(hook, "__self__", None)).__module__.startswith(
        "torch.distributed.fsdp."
    )
    if x.computed is not None or not is_fsdp_hook:
        return None
    handle = RemovableHandle(x.recipe.backward_hooks)
    x.recipe.backward_hooks[handle.id] = hook
    return handle


def _requires_grad(x: DeferredLogits) -> bool:
    if x.computed is not None:
        return x.computed.requires_grad
    return x.recipe.is_grad_enabled and any(
        t is not None and t.requires_grad for t in x.recipe.sources()
    )


# function of PyTorch -> what it does with deferred logits
_RULES: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _scale),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _divide),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    Tensor.float: _cast(torch.float32),
    Tensor.bfloat16: _cast(torch.bfloat16),
    Tensor.half: _cast(torch.float16),
    Tensor.to: _to,
    **dict.fromkeys((Tensor.clone, torch.clone), _clone),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    Tensor.__getitem__: _select_rows,
    **dict.fromkeys((Tensor.unbind, torch.unbind), _unbind),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    **dict.fromkeys((Tensor.gather, torch.gather), gather),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp), logsumexp),
    **dict.fromkeys((Tensor.mean, torch.mean), mean),
    **dict.fromkeys((Tensor.argmax, torch.argmax), argmax),
    **dict.fromkeys((Tensor.log_softmax, torch.log_softmax, F.log_softmax), log_softmax),
    Tensor.register_hook: _register_hook,
    **dict.fromkeys((Tensor.index_select, torch.index_select), _index_select),
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]  # its annotation lacks `__get__`
}
