"""Runs code without data for a device that this machine does not have. Tensors on the meta device
represent tensors of that device.

PyTorch's fake tensors of a CUDA device need CUDA. Without CUDA, autograd looks for the CUDA device
guard, and the Python interpreter crashes. Meta tensors need no device, but torch.autocast does not
apply to them. Inside `plan_device` this module therefore stores the autocast dtype. Isotype's ops
read this dtype. For all other matrix multiplications, the operands are cast to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class _PlanState:
    """The current planned device and autocast dtype. Both are plain class attributes, which Dynamo
    can trace.
    """

    device_type: str | None = None
    autocast_dtype: torch.dtype | None = None


_PRODUCTS = {
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, F.scaled_dot_product_attention,
    F.conv1d, F.conv2d, F.conv3d, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm,
}  # fmt: skip


def is_planned(device: torch.device) -> bool:
    """Returns True if tensors of this device currently represent tensors of another device."""
    return device.type == "meta" and _PlanState.device_type is not None


def target_device_type(device: torch.device) -> str:
    """Returns the device type for which an op chooses its code. For tensors on the meta device, it
    is the type of the planned device. For all other tensors, it is the type of `device`.
    """
    if device.type == "meta":
        return _PlanState.device_type or device.type
    return device.type


@contextmanager
def plan_device(device_type: str) -> Iterator[None]:
    """Within this block, code treats meta tensors as tensors of `device_type`."""
    previous = _PlanState.device_type
    _PlanState.device_type = device_type
    try:
        with _MetaAutocast():
            yield
    finally:
        _PlanState.device_type = previous


def autocast(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Runs torch.autocast in `dtype`; None switches autocast off. Inside `plan_device` this
    function has the same effect on meta tensors. Outside `plan_device` it does nothing for meta
    tensors.
    """
    if _PlanState.device_type is None:
        if device_type == "meta":
            return nullcontext()
        return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)
    return planned_autocast(dtype)


def autocast_dtype() -> torch.dtype | None:
    """Returns the autocast dtype of meta tensors inside `plan_device`."""
    return _PlanState.autocast_dtype


@contextmanager
def planned_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    previous = _PlanState.autocast_dtype
    _PlanState.autocast_dtype = dtype
    try:
        yield
    finally:
        _PlanState.autocast_dtype = previous


def autocast_off() -> AbstractContextManager[Any]:
    if _PlanState.autocast_dtype is None:
        return nullcontext()
    return planned_autocast(None)


def keep_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of `function`. Each call of the wrapper uses the autocast dtype that is
    planned now, even if another one is planned at the time of the call. Outside `plan_device` it
    returns `function` itself.
    """
    if _PlanState.device_type is None:
        return function
    cast = _PlanState.autocast_dtype

    def run(*args: Any, **kwargs: Any) -> Any:
        # PyTorch disables the mode inside backward, because the call of `backward` already passed
        # through it
        is_active = torch._C._is_torch_function_mode_enabled()
        with planned_autocast(cast), nullcontext() if is_active else _MetaAutocast():
            return function(*args, **kwargs)

    return run


_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_MAX_FLASH_HEAD_SIZE = 256


def attend_as_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs PyTorch's attention on meta tensors with the kernel that it uses on a GPU. For meta
    tensors, `scaled_dot_product_attention` itself would compute the matrix of all scores, which
    the kernels of a GPU do not store.
    """
    is_meta = query.device.type == "meta" and query.dim() == 4
    size = query.shape[-1]
    has_flash = query.dtype in _FLASH_DTYPES and size <= _MAX_FLASH_HEAD_SIZE
    if is_meta and has_flash and attn_mask is None and value.shape[-1] == size:
        output: Tensor
        output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
        return output
    if is_meta and query.dtype in (*_FLASH_DTYPES, torch.float32) and not enable_gqa:
        bias = attn_mask
        if bias is not None:
            bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
        output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
        return output
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


class _MetaAutocast(TorchFunctionMode):
    """Casts the operands of PyTorch's own matrix products, as autocast does."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = _PlanState.autocast_dtype
        if function is F.scaled_dot_product_attention and _PlanState.device_type == "cuda":
            function = attend_as_on_gpu
        elif function not in _PRODUCTS:
            return function(*args, **kwargs)
        if dtype is None:
            return function(*args, **kwargs)

        def cast(x: Any) -> Any:
            should_cast = (
                isinstance(x, Tensor)
                and x.device.type == "meta"
                and x.is_floating_point()
                and x.dtype != torch.float64
            )
            return x.to(dtype) if should_cast else x

        return function(*tree_map(cast, args), **tree_map(cast, kwargs))
