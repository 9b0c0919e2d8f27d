"""`modulated_layer_norm`: the public op and its autograd function. B pictures, T tokens, H hidden."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..autocast import autocast_off
from ..backend import cpp_runs, differentiated_again, reference_gradients, reference_runs, triton_runs
from ..by_picture import check_vectors
from ..debug import checked_in_debug
from ..remade import remember
from . import cpp, eager
from .contract import MODULATED_LAYER_NORM
from .reference import modulated_layer_norm_reference


class Paths(Protocol):
    """What each of the op's modules offers: `kernels`, `cpp` and `eager`."""

    def modulated_layer_norm_forward(
        self, x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, *, eps: float, out_dtype: torch.dtype
    ) -> Tensor: ...
    def modulated_layer_norm_backward(
        self, x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, *, eps: float, want_modulation: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


def _paths(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Paths:
    if triton_runs(x) and scale.dtype != torch.float64:
        from . import kernels

        # a row that does not fit takes plain PyTorch: no model has one
        return kernels if kernels.fits(x) else eager
    return cpp if out_dtype != torch.float64 and cpp_runs(cpp.KERNELS, x, scale) else eager


class ModulatedLayerNorm(torch.autograd.Function):
    """Saves its inputs alone: not the normed rows, and neither mean nor deviation of a row."""

    @staticmethod
    def forward(ctx: Any, x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_BTH, scale_BH, shift_BH)
        ctx.eps, ctx.out_dtype = eps, out_dtype
        with autocast_off(x_BTH):
            paths = _paths(x_BTH, scale_BH, out_dtype)
            return paths.modulated_layer_norm_forward(x_BTH, scale_BH, shift_BH, eps=eps, out_dtype=out_dtype)

    @staticmethod
    def backward(ctx: Any, dy_BTH: Tensor) -> tuple[Tensor | None, ...]:
        x_BTH, scale_BH, shift_BH = ctx.saved_tensors
        if differentiated_again():
            reference = partial(modulated_layer_norm_reference, eps=ctx.eps, out_dtype=ctx.out_dtype)
            return *reference_gradients(reference, (x_BTH, scale_BH, shift_BH), dy_BTH), None, None
        with autocast_off(x_BTH):
            grads = _paths(x_BTH, scale_BH, dy_BTH.dtype).modulated_layer_norm_backward(
                x_BTH, scale_BH, dy_BTH, eps=ctx.eps, want_modulation=any(ctx.needs_input_grad[1:3])
            )
        return *grads, None, None


@checked_in_debug(MODULATED_LAYER_NORM)
def modulated_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """LayerNorm without weights, times 1 + scale, plus shift (adaptive LayerNorm), in one pass; a LoRA layer makes its result again.

    x            X[B T H]   any float dtype, unchanged by autocast
    scale, shift M[B H]     of each picture, any float dtype: fp32 ones do not widen the output
    ->           X[B T H]   or out_dtype
    inside       fp32       (fp64 when either is fp64); narrowed once, after the shift
    grads        x: X       scale: M   shift: M   summed over tokens in fp32
    Raises       ShapeError SH001; DtypeError DT001 when scale and shift differ
    Source       adaLN of Peebles and Xie 2022, with the norm of Ba et al. 2016
    """
    check_vectors(x, scale=scale, shift=shift)
    if reference_runs():
        return modulated_layer_norm_reference(x, scale, shift, eps, out_dtype=out_dtype)
    made: Tensor = ModulatedLayerNorm.apply(x, scale, shift, eps, out_dtype or x.dtype)
    return remember(made, partial(modulated_layer_norm, eps=eps, out_dtype=out_dtype), x, scale, shift)
