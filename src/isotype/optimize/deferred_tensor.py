"""Defines the base class of deferred logits and deferred log-probabilities. A deferred tensor is
computed only when its values are needed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from ..ops.backend import refuse_second_derivative

T = TypeVar("T", bound="DeferredTensor")

# functions that need no values of a tensor
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
    """Adds a deferred tensor to autograd's graph. This is needed for code that bypasses
    `__torch_function__`, such as autograd functions, TorchScript, and `vmap` and other transforms.
    Backward computes the tensor again from its sources, and then computes the gradients of the
    sources.

    make     returns the deferred tensor
    sources  the tensors from which it is computed, with their graphs
    remake   computes the real tensor from detached sources
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
    """Calls `make()`, and adds the result to autograd's graph if `grad` is set and a source
    requires gradients. See `Graph`.
    """
    needs_graph = (
        grad and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in sources)
    )
    # a functorch transform refuses this form of an autograd function, and calls __torch_function__
    # itself
    if (
        not needs_graph
        or torch.is_inference_mode_enabled()
        or torch._C._are_functorch_transforms_active()
    ):
        return make()
    result: T = Graph.apply(make, sources, remake, *sources)
    return result


def _is_inside_autograd_function() -> bool:
    """Whether the forward of an autograd function is running. Inside such a forward, tensors must
    not be deferred, because the graph of a deferred tensor would bypass the function's backward.

    `Function.apply` has a frame before torch 2.15 only.
    """
    forwards = {_read_code(function.forward) for function in _iterate_autograd_functions()}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _iterate_autograd_functions(
    base: type = torch.autograd.Function,
) -> Iterator[type[torch.autograd.Function]]:
    """Yields the subclasses of `torch.autograd.Function` that the program has defined."""
    subclass: type[torch.autograd.Function]
    for subclass in base.__subclasses__():
        yield subclass
        yield from _iterate_autograd_functions(subclass)


def _read_code(function: Any) -> CodeType | None:
    return getattr(inspect.unwrap(function), "__code__", None)


def _has_graph(x: Any) -> bool:
    """Whether this is a deferred tensor that is part of autograd's graph."""
    if not isinstance(x, DeferredTensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.requires_grad


class DeferredTensor(Tensor):
    """A tensor with shape, dtype and device, but without memory. Functions that need its values get
    the real tensor.

    computed  the real tensor, or None until it is needed
    """

    computed: Tensor | None

    def materialise(self, function_name: str = "materialise") -> Tensor:
        """Computes the real tensor once.

        function_name  the name of the function that needs the values
        """
        raise NotImplementedError

    @classmethod
    def compute_without_values(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        """Returns the result of `func` if it can be computed without the tensor's values. Otherwise
        returns None.
        """
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
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function without cls
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # reached by C++ callers that bypass __torch_function__, such as the inputs of an
        # autograd.Function
        return cls._with_real_tensors(func, str(func), args, kwargs or {})

    @classmethod
    def _with_real_tensors(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        def materialise_argument(x: Any) -> Any:
            return x.materialise(name) if isinstance(x, cls) else x

        return func(*tree_map(materialise_argument, args), **tree_map(materialise_argument, kwargs))


# id of a trained weight -> optimizer steps since `count_changes` was first called with it. The key
# is not a weak reference, because torch.utils.swap_tensors refuses a weight that has one. A new
# tensor may get the id of a freed one; its count then begins above 0, which is harmless because
# only differences matter
_steps: dict[int, int] = {}


def count_changes(weight: Tensor) -> tuple[int, int]:
    """Returns PyTorch's version counter of a weight, and the number of optimizer steps since this
    function was first called for the weight.
    """
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
