"""Defines the ops `modulated_layer_norm` and `gated_residual`, which diffusion transformers use.
All tokens of a picture have the same scale, shift or gate.

B is the number of pictures, T the number of tokens, and H the hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..backend import (
    Implementation,
    apply_function,
    arithmetic_dtype,
    cast_output,
    choose_implementation,
    refuse_second_derivative,
)
from ..contract import OpContract
from ..cpp import CppKernels
from ..library import library_op
from ..recomputable import mark_recomputable, recompute, saved_or_recomputed

# the output has the dtype of x; scale and shift may have another dtype
MODULATED_LAYER_NORM = OpContract(
    "x: X[B T H], scale: M[B H], shift: M[B H] -> X[B T H]",
    inside="fp32",
    grads={"x": "X", "scale": "M", "shift": "M"},
    autocast="ignored",
)
# the output has the dtype of the residual, for a gate of any dtype
GATED_RESIDUAL = OpContract(
    "residual: F[B T H], x: F[B T H], gate: M[B H] -> F[B T H]",
    inside="fp32",
    grads={"residual": "F", "x": "F", "gate": "M"},
    autocast="ignored",
)


def _check_vectors(x: Tensor, **vectors: Tensor) -> None:
    """Raises ShapeError SH001 unless x is [B T H] and each vector [B H]. Raises DtypeError DT001 if
    the vectors differ in dtype.
    """
    for name, vector in vectors.items():
        if x.dim() != 3 or vector.shape != (x.shape[0], x.shape[2]):
            raise ShapeError(
                f"{name} is {list(vector.shape)} where x is {list(x.shape)}: expected [B H] and [B"
                " T H]",
                code="SH001",
            )
    (name, first), *other_vectors = vectors.items()
    for other_name, vector in other_vectors:
        if vector.dtype != first.dtype:
            raise DtypeError(
                f"{name} is {first.dtype} and {other_name} is {vector.dtype}, declared one float"
                " dtype",
                code="DT001",
            )


# --- the C++ kernels of cpu.cpp: fp32, bf16 or fp16, which may differ between x, vectors and output

KERNELS = CppKernels(
    __file__,
    norm_forward="ddppppiiiif",
    norm_backward="ddpppppiiiiiif",
    gate_forward="dppppiiiii",
    gate_backward="dpppppiiiiii",
)
# the largest number of partial sums of a vector's gradient per picture, and the smallest number of
# rows per partial sum
_MAX_PARTIAL_SUMS = 64
_MIN_ROWS = 16


def _flatten_rows(x_BTH: Tensor) -> Tensor:
    """Reshapes x to [B*T H]. In the result, the values of each row are adjacent in memory."""
    x_RH = x_BTH.reshape(-1, x_BTH.shape[-1])
    return x_RH if x_RH.stride(-1) == 1 else x_RH.contiguous()


def _to_fp32(vector_BH: Tensor, offset: float = 0.0) -> Tensor:
    v = vector_BH.to(torch.float32).contiguous()
    return v + offset if offset else v


def _empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@library_op(
    "modulated_layer_norm_forward_cpp(Tensor x, Tensor scale, Tensor shift, float eps, ScalarType"
    " out_dtype) -> Tensor",
    fake=lambda x, scale, shift, eps, out_dtype: _empty_like(x, out_dtype),
)
def _cpp_norm_forward(
    x_BTH: Tensor, scale_BH: Tensor, shift_BH: Tensor, eps: float, out_dtype: torch.dtype
) -> Tensor:
    y_BTH = _empty_like(x_BTH, out_dtype)
    x_RH = _flatten_rows(x_BTH)
    KERNELS(
        "norm_forward",
        x_RH.dtype,
        out_dtype,
        x_RH,
        _to_fp32(scale_BH, 1.0),
        _to_fp32(shift_BH),
        y_BTH,
        *x_RH.shape,
        x_RH.stride(0),
        max(1, x_BTH.shape[1]),
        eps,
    )
    return y_BTH


def _fake_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = scale_BH.shape if want_modulation else (0,)
    return _empty_like(x_BTH), scale_BH.new_empty(shape), scale_BH.new_empty(shape)


@library_op(
    "modulated_layer_norm_backward_cpp(Tensor x, Tensor scale, Tensor dy, float eps, bool"
    " want_modulation) -> (Tensor, Tensor, Tensor)",
    fake=_fake_norm_backward,
)
def _cpp_norm_backward(
    x_BTH: Tensor, scale_BH: Tensor, dy_BTH: Tensor, eps: float, want_modulation: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, scale and shift. The gradients of scale and shift are empty if
    they are not needed.
    """
    pictures, tokens, hidden = x_BTH.shape
    x_RH = _flatten_rows(x_BTH)
    dy_RH = _flatten_rows(dy_BTH)
    dx_BTH = _empty_like(x_BTH)
    block = max(_MIN_ROWS, -(-tokens // _MAX_PARTIAL_SUMS))
    if want_modulation:
        partial_sums = torch.empty((pictures, -(-tokens // block), 2, hidden), dtype=torch.float32)
    else:
        partial_sums = None
    KERNELS(
        "norm_backward",
        x_RH.dtype,
        dy_RH.dtype,
        x_RH,
        _to_fp32(scale_BH, 1.0),
        dy_RH,
        dx_BTH,
        partial_sums,
        *x_RH.shape,
        x_RH.stride(0),
        dy_RH.stride(0),
        max(1, tokens),
        block,
        eps,
    )
    if partial_sums is None:
        return dx_BTH, scale_BH.new_empty(0), scale_BH.new_empty(0)
    # summed in fp32 and narrowed once. They are two tensors, since results of an operator must not
    # share memory
    dscale_BH, dshift_BH = (partial_sums[:, :, i].sum(1).to(scale_BH.dtype) for i in range(2))
    return dx_BTH, dscale_BH, dshift_BH


@library_op(
    "gated_residual_forward_cpp(Tensor residual, Tensor x, Tensor gate) -> Tensor",
    fake=lambda residual, x, gate: _empty_like(x),
)
def _cpp_gate_forward(residual_BTH: Tensor, x_BTH: Tensor, gate_BH: Tensor) -> Tensor:
    y_BTH = _empty_like(x_BTH)
    residual_RH = _flatten_rows(residual_BTH)
    x_RH = _flatten_rows(x_BTH)
    KERNELS(
        "gate_forward",
        x_RH.dtype,
        residual_RH,
        x_RH,
        _to_fp32(gate_BH),
        y_BTH,
        *x_RH.shape,
        residual_RH.stride(0),
        x_RH.stride(0),
        max(1, x_BTH.shape[1]),
    )
    return y_BTH


def _fake_gate_backward(
    x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool
) -> tuple[Tensor, Tensor]:
    return _empty_like(x_BTH), gate_BH.new_empty(gate_BH.shape if want_gate else (0,))


@library_op(
    "gated_residual_backward_cpp(Tensor x, Tensor gate, Tensor dy, bool want_gate) -> (Tensor,"
    " Tensor)",
    fake=_fake_gate_backward,
)
def _cpp_gate_backward(
    x_BTH: Tensor, gate_BH: Tensor, dy_BTH: Tensor, want_gate: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the gate. The gradient of the gate is empty if it is not
    needed. The gradient of the residual is dy.
    """
    pictures, tokens, hidden = x_BTH.shape
    x_RH = _flatten_rows(x_BTH)
    dy_RH = _flatten_rows(dy_BTH)
    dx_BTH = _empty_like(x_BTH)
    block = max(_MIN_ROWS, -(-tokens // _MAX_PARTIAL_SUMS))
    if want_gate:
        partial_sums = torch.empty((pictures, -(-tokens // block), hidden), dtype=torch.float32)
    else:
        partial_sums = None
    KERNELS(
        "gate_backward",
        x_RH.dtype,
        x_RH,
        _to_fp32(gate_BH),
        dy_RH,
        dx_BTH,
        partial_sums,
        *x_RH.shape,
        x_RH.stride(0),
        dy_RH.stride(0),
        max(1, tokens),
        block,
    )
    # summed in fp32, and narrowed once
    return dx_BTH, gate_BH.new_empty(0) if partial_sums is None else partial_sums.sum(1).to(
        gate_BH.dtype
    )


# --- modulated_layer_norm


def modulated_layer_norm_reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the op in plain PyTorch. It also supports fp64 inputs."""
    h = x.to(arithmetic_dtype(x.dtype, scale.dtype))
    centred = h - h.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + scale.to(h.dtype))[:, None] + shift.to(h.dtype)[:, None]).to(
        out_dtype or x.dtype
    )


def _normalise(x: Tensor, dtype: torch.dtype, eps: float) -> tuple[Tensor, Tensor]:
    """Scales each row to a mean of 0 and a variance of 1. Returns the scaled rows, and 1 / standard
    deviation of each row.
    """
    normed, _, factor = torch.native_layer_norm(x.to(dtype), (x.shape[-1],), None, None, eps)
    return normed, factor


class ModulatedLayerNorm(torch.autograd.Function):
    """The autograd function of `modulated_layer_norm`. It saves only its inputs (or the tensors
    from which x is recomputed, see `ops.recomputable`). It does not save the normalised rows, the
    means or the deviations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTH: Tensor,
        scale_BH: Tensor,
        shift_BH: Tensor,
        eps: float,
        out_dtype: torch.dtype,
        implementation: Implementation,
    ) -> Tensor:
        ctx.recompute_x, saved_x = saved_or_recomputed(x_BTH, x_BTH)
        ctx.save_for_backward(scale_BH, *saved_x)
        ctx.implementation = implementation
        ctx.eps = eps
        if implementation == "cpp":
            return _cpp_norm_forward(x_BTH, scale_BH, shift_BH, eps, out_dtype)
        if implementation == "triton":
            from . import triton

            # longer rows, which no model has, run in plain PyTorch
            if triton.fits_in_registers(x_BTH):
                return triton.modulated_layer_norm_forward(
                    x_BTH, scale_BH, shift_BH, eps, out_dtype
                )
        normed, _ = _normalise(x_BTH, arithmetic_dtype(x_BTH.dtype, scale_BH.dtype), eps)
        return cast_output(
            normed * (1.0 + scale_BH.to(normed.dtype))[:, None]
            + shift_BH.to(normed.dtype)[:, None],
            out_dtype,
        )

    @staticmethod
    def backward(ctx: Any, dy_BTH: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("modulated_layer_norm")
        scale_BH, *saved_x = ctx.saved_tensors
        x_BTH = saved_x[0] if ctx.recompute_x is None else recompute(ctx.recompute_x, saved_x)
        want_modulation = any(ctx.needs_input_grad[1:3])
        eps = ctx.eps
        implementation = ctx.implementation
        if implementation == "cpp":
            dx_BTH, dscale_BH, dshift_BH = _cpp_norm_backward(
                x_BTH, scale_BH, dy_BTH, eps, want_modulation
            )
            return (
                dx_BTH,
                *((dscale_BH, dshift_BH) if want_modulation else (None, None)),
                None,
                None,
                None,
            )
        if implementation == "triton":
            from . import triton

            if triton.fits_in_registers(x_BTH):
                return (
                    *triton.modulated_layer_norm_backward(
                        x_BTH, scale_BH, dy_BTH, eps, want_modulation
                    ),
                    None,
                    None,
                    None,
                )
        normed, factor = _normalise(x_BTH, arithmetic_dtype(x_BTH.dtype, scale_BH.dtype), eps)
        dy = dy_BTH.to(normed.dtype)
        g = dy * (1.0 + scale_BH.to(normed.dtype))[:, None]
        dx = (
            factor * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
        ).to(x_BTH.dtype)
        if not want_modulation:
            return dx, None, None, None, None, None
        # summed in the wide dtype, and narrowed once
        return (
            dx,
            (dy * normed).sum(1).to(scale_BH.dtype),
            dy.sum(1).to(scale_BH.dtype),
            None,
            None,
            None,
        )


def modulated_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-6,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes LayerNorm(x) * (1 + scale) + shift in one pass, where LayerNorm has no weights
    (adaptive LayerNorm). If a LoRA layer reads the result, it recomputes the result in backward.

    x            X[B T H]   any float dtype, unchanged by autocast
    scale, shift M[B H]     one vector per picture, any float dtype; the output keeps the dtype of x
                            if they are fp32
    ->           X[B T H]   or out_dtype
    inside       fp32       (fp64 when either is fp64); rounded once, after the shift
    grads        x: X       scale: M   shift: M   summed over tokens in fp32
    Raises       ShapeError SH001; DtypeError DT001 when scale and shift differ
    Source       adaLN of Peebles and Xie 2022; LayerNorm of Ba et al. 2016
    """
    _check_vectors(x, scale=scale, shift=shift)
    implementation = choose_implementation(KERNELS, x, scale, out_dtype=out_dtype)
    y: Tensor = apply_function(
        ModulatedLayerNorm, x, scale, shift, eps, out_dtype or x.dtype, implementation
    )
    return mark_recomputable(
        y, partial(modulated_layer_norm, eps=eps, out_dtype=out_dtype), x, scale, shift
    )


# --- gated_residual


def gated_residual_reference(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Computes the op in plain PyTorch. It also supports fp64 inputs."""
    dtype = arithmetic_dtype(x.dtype, gate.dtype)
    return cast_output(residual.to(dtype) + gate.to(dtype)[:, None] * x.to(dtype), residual.dtype)


class GatedResidual(torch.autograd.Function):
    """The autograd function of `gated_residual`. It saves the gate, and x if the gate needs a
    gradient. The residual's gradient is the incoming gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual_BTH: Tensor,
        x_BTH: Tensor,
        gate_BH: Tensor,
        implementation: Implementation,
    ) -> Tensor:
        ctx.save_for_backward(x_BTH if ctx.needs_input_grad[2] else None, gate_BH)
        ctx.implementation = implementation
        if implementation == "cpp":
            return _cpp_gate_forward(residual_BTH, x_BTH, gate_BH)
        if implementation == "triton":
            from . import triton

            if triton.fits_in_registers(x_BTH):
                return triton.gated_residual_forward(residual_BTH, x_BTH, gate_BH)
        return gated_residual_reference(residual_BTH, x_BTH, gate_BH)

    @staticmethod
    def backward(ctx: Any, dy_BTH: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("gated_residual")
        saved_x, gate_BH = ctx.saved_tensors
        # if the gate needs no gradient, only the shape and dtype of x are read
        if saved_x is None:
            x_BTH = dy_BTH
        else:
            x_BTH = saved_x
        needs_residual, _, want_gate, _ = ctx.needs_input_grad
        dresidual = dy_BTH if needs_residual else None
        implementation = ctx.implementation
        if implementation == "cpp":
            dx_BTH, dgate_BH = _cpp_gate_backward(x_BTH, gate_BH, dy_BTH, want_gate)
            return dresidual, dx_BTH, dgate_BH if want_gate else None, None
        if implementation == "triton":
            from . import triton

            if triton.fits_in_registers(x_BTH):
                return (
                    dresidual,
                    *triton.gated_residual_backward(x_BTH, gate_BH, dy_BTH, want_gate),
                    None,
                )
        dtype = arithmetic_dtype(x_BTH.dtype, gate_BH.dtype)
        dy = dy_BTH.to(dtype)
        dx = (dy * gate_BH.to(dtype)[:, None]).to(x_BTH.dtype)
        # summed in the wide dtype, and narrowed once
        return (
            dresidual,
            dx,
            (dy * x_BTH.to(dtype)).sum(1).to(gate_BH.dtype) if want_gate else None,
            None,
        )


def gated_residual(residual: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Computes residual + gate * x in one pass, and rounds the result once. It saves the gate, and
    x if the gate needs a gradient.

    residual  F[B T H]   any float dtype, unchanged by autocast
    x         F[B T H]
    gate      M[B H]     one vector per picture, any float dtype; the output keeps the dtype of x if
              the gate is fp32
    ->        F[B T H]
    inside    fp32       (fp64 when either is fp64)
    grads     residual: F   x: F   gate: M   summed over tokens in fp32
    Raises    DtypeError DT001 when residual and x differ; ShapeError SH001
    """
    _check_vectors(x, gate=gate)
    if residual.dtype != x.dtype:
        raise DtypeError(
            f"residual is {residual.dtype} and x is {x.dtype}, declared one float dtype",
            code="DT001",
            fix="x.to(residual.dtype)",
        )
    if residual.shape != x.shape:
        raise ShapeError(
            f"residual is {list(residual.shape)} and x is {list(x.shape)}, declared one shape",
            code="SH001",
        )
    y: Tensor = apply_function(
        GatedResidual, residual, x, gate, choose_implementation(KERNELS, x, gate)
    )
    return y
