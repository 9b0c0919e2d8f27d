"""Computes convolutions of bf16 or fp16 tensors in fp32, on a CPU without instructions for them.

PyTorch computes a bf16 convolution there without oneDNN. With 64 channels of 32 x 32, a kernel of
3 x 3 and two pictures, forward takes 137 ms in bf16 and 2.5 ms in fp32, and backward 33 and 5.5 ms
(one thread of an AMD EPYC with AVX2, torch 2.13).

As in `widened_products`, a few pictures at a time are cast to fp32, and the result is rounded once.
The cast blocks take less memory than the unfolded input that PyTorch's own convolution stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from .backend import fast_autocast_off
from .library import library_op
from .widened_products import product_blocks, widened_call_dtype

_ATEN_BACKWARD = torch.ops.aten.convolution_backward.default
_ARGUMENTS = "int[] stride, int[] padding, int[] dilation, int groups"


class ConvolutionSettings(NamedTuple):
    """The settings of a convolution, with one number for each dimension of the picture."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    stride, padding, dilation, groups = settings
    no_output_padding = [0] * len(stride)
    return torch.convolution(
        x, weight, bias, stride, padding, dilation, False, no_output_padding, groups
    )


@library_op(
    f"widened_convolution(Tensor x, Tensor weight, Tensor? bias, {_ARGUMENTS}) -> Tensor",
    fake=_compute,
    is_product=True,
)
def _widened_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    weight_fp32 = weight.float()
    bias_fp32 = None if bias is None else bias.float()
    blocks = product_blocks(x.shape[0], x[:1].numel(), 1)
    with fast_autocast_off():
        if len(blocks) <= 1:
            return _compute(x.float(), weight_fp32, bias_fp32, *settings).to(x.dtype)
        parts = [
            _compute(x[samples].float(), weight_fp32, bias_fp32, *settings).to(x.dtype)
            for samples in blocks
        ]
    return torch.cat(parts)


def _fake_backward(
    dy: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), dy.new_empty(dy.shape[1])


@library_op(
    f"widened_convolution_backward(Tensor dy, Tensor x, Tensor weight, {_ARGUMENTS},"
    " bool[] needs) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    is_product=True,
)
def _widened_convolution_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and bias. A gradient that is not needed is empty. The
    gradients of weight and bias are summed over all samples in fp32.
    """
    weight_fp32 = weight.float()
    no_output_padding = [0] * len(stride)
    dx = torch.empty_like(x) if needs[0] else x.new_empty(0)
    dweight = torch.zeros_like(weight_fp32) if needs[1] else weight_fp32.new_empty(0)
    dbias = weight_fp32.new_zeros(dy.shape[1] if needs[2] else 0)
    with fast_autocast_off():
        for samples in product_blocks(x.shape[0], x[:1].numel(), 1):
            block_dx, block_dweight, block_dbias = _ATEN_BACKWARD(
                dy[samples].float(),
                x[samples].float(),
                weight_fp32,
                [dy.shape[1]],
                stride,
                padding,
                dilation,
                False,
                no_output_padding,
                groups,
                needs,
            )
            if needs[0]:
                dx[samples] = block_dx
            if needs[1]:
                dweight += block_dweight
            if needs[2]:
                dbias += block_dbias
            # the next block takes their memory
            del block_dx, block_dweight, block_dbias
    return dx, dweight.to(weight.dtype), dbias.to(dy.dtype)


def _samples_in_block(x: Tensor) -> int:
    samples = product_blocks(x.shape[0], x[:1].numel(), 1)[0]
    return int(min(x.shape[0], samples.stop))


def _forward_scratch_bytes(x: Tensor, weight: Tensor, *rest: Any) -> int:
    """The fp32 copies of the weight and of the inputs and results of a block."""
    output = _compute(x.to("meta"), weight.to("meta"), None, *rest[1:])
    share = _samples_in_block(x) / x.shape[0]
    return 4 * (weight.numel() + int(share * (x.numel() + output.numel())))


def _backward_scratch_bytes(dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    share = _samples_in_block(x) / x.shape[0]
    # oneDNN reorders one of the operands
    return 4 * (2 * weight.numel() + int(share * (3 * x.numel() + dy.numel())))


def scratch_estimators() -> dict[Any, Callable[..., int]]:
    """Returns estimators for memory plans, as in `widened_products`."""
    return {
        torch.ops.isotype.widened_convolution.default: _forward_scratch_bytes,
        torch.ops.isotype.widened_convolution_backward.default: _backward_scratch_bytes,
    }


class WidenedConvolution(Function):
    """Computes a convolution and its gradients in fp32. All tensors have one narrow dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvolutionSettings
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        ctx.has_bias = bias is not None
        return _widened_convolution(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
        stride, padding, dilation, groups = ctx.settings
        gradients: tuple[Tensor | None, ...]
        if torch.is_grad_enabled():
            # second derivatives need operators that autograd records
            gradients = _ATEN_BACKWARD(
                dy,
                x,
                weight,
                [dy.shape[1]],
                stride,
                padding,
                dilation,
                False,
                [0] * len(stride),
                groups,
                needs,
            )
        else:
            gradients = _widened_convolution_backward(
                dy, x, weight, stride, padding, dilation, groups, needs
            )
        dx, dweight, dbias = (
            gradient if is_needed else None
            for gradient, is_needed in zip(gradients, needs, strict=True)
        )
        return dx, dweight, dbias, None


def convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes what the method `_conv_forward` of nn.Conv1d, nn.Conv2d or nn.Conv3d computes, with
    autocast's rules.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    dtype = None
    if not torch.compiler.is_dynamo_compiling():
        dtype = widened_call_dtype(*tensors)
    dimensions = len(layer.stride)
    if dtype is None or x.dim() != dimensions + 2 or x.numel() == 0:
        y: Tensor = type(layer)._conv_forward(layer, x, weight, bias)
        return y
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        # padding "same" may differ between the two sides of a dimension
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        padding = (0,) * dimensions
    settings = ConvolutionSettings(
        list(layer.stride), list(padding), list(layer.dilation), layer.groups
    )
    bias_cast = None if bias is None else bias.to(dtype)
    # autocast lets PyTorch reflect in fp32, so the cast comes after the padding
    output: Tensor = WidenedConvolution.apply(x.to(dtype), weight.to(dtype), bias_cast, settings)
    return output


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_plain_convolution(module: nn.Module) -> bool:
    """Whether `convolve` can replace the convolution of this layer. Subclasses that pad their input
    and then call the method of PyTorch's class are included.
    """
    return isinstance(module, CONVOLUTIONS) and any(
        type(module)._conv_forward is kind._conv_forward for kind in CONVOLUTIONS
    )
