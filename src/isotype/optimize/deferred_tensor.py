"""A tensor that is not yet computed: what deferred logits and deferred log-probabilities have in
common.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from ..ops.backend import refuse_second_derivative

T = TypeVar("T", bound="DeferredTensor")

# functions that need no values
_METADATA = {
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.get_device,
    ),
    *(
        Tensor.element_size,
        Tensor.is_contiguous,
        Tensor.__len__,
        torch.is_floating_point,
        torch.numel,
    ),
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "is_cuda",
            "layout",
            "is_sparse",
            "is_meta",
            "_base",
        )
    ),
}


class Graph(torch.autograd.Function):
    """Adds a deferred tensor to autograd's graph, for code that bypasses `__torch_function__`:
    autograd functions, `vmap` and other transforms, TorchScript. Backward recomputes the tensor from
    its sources and differentiates that.

    make     returns the deferred tensor
    sources  the tensors that it is computed from, with their graphs
    remake   computes the real tensor from other sources
    """

    @staticmethod
    def forward(
        ctx: Any,
        make: Callable[[], Tensor],
        sources: list[Any],
        remake: Callable[..., Tensor],
        *tensors: Any,
    ) -> Tensor:
        ctx.sources = sources
        ctx.remake = remake
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative("what is made of deferred logits")
        needs_grad = ctx.needs_input_grad[3:]
        leaves = [
            x if x is None else x.detach().requires_grad_(need)
            for x, need in zip(ctx.sources, needs_grad, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.remake(*leaves)
        inputs: list[Any] = [x for x, need in zip(leaves, needs_grad, strict=True) if need]
        gradients = iter(torch.autograd.grad(result, inputs, gradient, allow_unused=True))
        return None, None, None, *(next(gradients) if need else None for need in needs_grad)


def attach_to_graph(
    make: Callable[[], T], sources: list[Any], remake: Callable[..., Tensor], *, grad: bool
) -> T:
    """`make()`, with gradients for its sources where `grad` and the sources ask for them. See
    `Graph`.
    """
    needs_graph = (
        grad and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in sources)
    )
    # a transform refuses this form of an autograd function, and gives what it differentiates to
    # __torch_function__
    if (
        not needs_graph
        or torch.is_inference_mode_enabled()
        or torch._C._are_functorch_transforms_active()
    ):
        return make()
    result: T = Graph.apply(make, sources, remake, *sources)
    return result


def _is_inside_autograd_function() -> bool:
    """Whether the forward of an autograd function is running. What it computes from its inputs has
    to be real: a deferred tensor has its own graph, which bypasses the function's backward.
    """
    frame: FrameType | None = sys._getframe(2)
    method: Any = torch.autograd.Function.apply
    apply = method.__func__.__code__
    while frame is not None and frame.f_code is not apply:
        frame = frame.f_back
    return frame is not None


def _has_graph(x: Any) -> bool:
    """Whether it is a deferred tensor that PyTorch itself differentiates."""
    if not isinstance(x, DeferredTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


class DeferredTensor(Tensor):
    """A wrapper tensor: it has shape, dtype and device, and no memory. Functions that need values get
    the real tensor.

    computed  the real tensor, once it was needed
    """

    computed: Tensor | None

    def materialise(self, function_name: str = "materialise") -> Tensor:
        """The real tensor, computed once. `function_name`: the function that needs it."""
        raise NotImplementedError

    @classmethod
    def compute_without_values(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        """The result of `func` where it needs no values; None where it does."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        needs_values = (
            not torch.is_grad_enabled()
            and any(_has_graph(x) for x in args)
            and _is_inside_autograd_function()
        )
        result = None if needs_values else cls.compute_without_values(func, args, kwargs)
        if result is None:
            return cls._with_real_tensors(func, getattr(func, "__name__", str(func)), args, kwargs)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as the C function that stands in its place, without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ callers that never met __torch_function__ (an autograd.Function's inputs, for one)
        return cls._with_real_tensors(func, str(func), args, kwargs or {})

    @classmethod
    def _with_real_tensors(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        def real(x: Any) -> Any:
            return x.materialise(name) if isinstance(x, cls) else x

        return func(*tree_map(real, args), **tree_map(real, kwargs))


# id of a trained weight that was asked about -> steps. Not a weak reference:
# torch.utils.swap_tensors refuses a weight that has one. A new tensor may get the id of a dead one:
# its count then begins above 0, and only differences matter.
_steps: dict[int, int] = {}


def count_changes(weight: Tensor) -> tuple[int, int]:
    """(version, optimizer steps since the first question)."""
    trained = weight.requires_grad and weight.is_leaf
    if trained:
        _register_step_hook()
    steps = _steps.setdefault(id(weight), 0) if trained else 0
    if weight.is_inference():
        return 0, steps
    return weight._version, steps


@cache
def _register_step_hook() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if id(weight) in _steps:
                _steps[id(weight)] += 1
