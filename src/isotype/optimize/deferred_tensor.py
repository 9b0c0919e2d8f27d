"""A tensor that is not yet computed: what deferred logits, deferred log-probabilities and a deferred loss have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# functions that need no values
_METADATA = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
    *(Tensor.element_size, Tensor.is_contiguous, Tensor.__len__, torch.is_floating_point, torch.numel),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_meta", "_base")),
}


class DeferredTensor(Tensor):
    """A wrapper tensor: it has shape, dtype and device, and no memory. Every function that it does not answer gets the real tensor.

    computed  the real tensor, once it was needed
    """

    computed: Tensor | None

    def materialise(self, asked_by: str = "materialise") -> Tensor:
        """The real tensor, computed once. `asked_by`: the function that needs it."""
        raise NotImplementedError

    @classmethod
    def answered(cls, func: Any, args: Any, kwargs: Any) -> Any | None:
        """What `func` gives without the values; None where it needs them."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        known = cls.answered(func, args, kwargs)
        return cls._with_real_tensors(func, getattr(func, "__name__", str(func)), args, kwargs) if known is None else known

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
