"""Quantisation-aware training of LoRA layers: a layer computes with the rounded weight that the
exported file will contain, which is the weight that is served later. The layer computes
x Q(W + s B A)ᵀ + bias. Q rounds a weight to the format of the file, exactly as `isotype export`
does. s is the scale of the adapter.

Q is a step function, whose gradient is zero almost everywhere. Backward treats Q as the identity
function (the straight-through estimator of Bengio et al. 2013). So A and B have the same gradient
formulas as in a LoRA layer. Computing them needs no matrix of the size of W:

dx = dy Q(W + s B A)      dA = s (dy B)ᵀ x      dB = s dyᵀ (x Aᵀ)

The rounded weight is computed once after each update and then kept in its packed form. It is
computed again when the weight, A, B or the scale have changed. It takes 4.5 bits per value in Q4_0.
Forward, backward and the recompute of gradient checkpointing dequantise it, in the same way as the
weights of a quantised base model.

T is the number of tokens, K the number of input features, O the number of output features, and R
the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..ops.backend import autocast_off, refuse_second_derivative
from ..ops.packed import PackedState
from ..ops.widened_products import matmul
from .linear import LoraDtypes, Projection, base_product, base_weight
from .products import gradient_product
from .quantised import NotCopied, bias_gradient, dequantise_weight

Pack = Callable[[Tensor], tuple[Tensor, PackedState]]  # fp32[O K] -> packed weight and its state


class _Updates:
    """Counts the steps of all optimizers. The version counter of a tensor does not count all of
    them, because torch's fused AdamW changes a weight without increasing its version counter.
    """

    count = 0
    is_counting = False

    @classmethod
    def start_counting(cls) -> None:
        if not cls.is_counting:
            cls.is_counting = True
            register_optimizer_step_post_hook(cls._add_step)

    @classmethod
    def _add_step(cls, *_: Any) -> None:
        cls.count += 1


class ServedWeight(NotCopied):
    """Rounds the weight of one LoRA layer to the format in which the model will be exported and
    served.

    pack       the function that rounds a weight to the format
    is_active  whether the layer multiplies by the rounded weight. A run sets it to False until it
               has done the fraction `adapter.serve_from` of its steps. Until then the layer
               multiplies by W + s B A
    """

    def __init__(self, pack: Pack) -> None:
        _Updates.start_counting()
        self.pack = pack
        self.is_active = True
        self._versions: tuple[Any, ...] = ()
        self._packed: tuple[Tensor, PackedState] | None = None

    @property
    def format_name(self) -> str:
        """The format of the current rounded weight; "" if there is none."""
        if self._packed is None:
            return ""
        state = self._packed[1]
        if state.dtype_name == "gguf":
            # a GGUF weight is stored under the name of its kind of blocks, such as `Q4_0`
            return state.layout.packed_tensor[0].lower()
        return state.dtype_name

    def round_weight(self, projection: Projection) -> tuple[Tensor, PackedState]:
        """Returns Q(W + s B A) in its packed form. It is computed again if A, B or the scale
        changed."""
        tensors = (projection.weight, projection.a, projection.b)
        tensor_versions = [(id(t), _tensor_version(t)) for t in tensors]
        versions = (*tensor_versions, projection.scale, _Updates.count)
        if self._packed is None or self._versions != versions:
            self._packed = None  # freed before the next one is made
            with torch.inference_mode(mode=False):  # the result is used in training too
                self._packed = self.pack(merged_weight(projection))
            self._versions = versions
        return self._packed


def _tensor_version(tensor: Tensor | None) -> int:
    """Returns the number of changes in place that PyTorch counted. An inference tensor has none."""
    if tensor is None or tensor.is_inference():
        return 0
    return tensor._version


@torch.no_grad()
def merged_weight(projection: Projection) -> Tensor:
    """Returns W + s B A in fp32. The values are bit-identical to the merged weight that `isotype
    export` computes.
    """
    assert projection.a is not None
    assert projection.b is not None
    with autocast_off(projection.a):
        w_OK = base_weight(projection.weight, projection.quant_state, torch.float32)
        delta_OK = (projection.b.float() @ projection.a.float()) * projection.scale
        return w_OK + delta_OK


class ServedLinear(torch.autograd.Function):
    """Computes x Q(W + s B A)ᵀ + bias. `packed` and `state` are the rounded weight Q(W + s B A)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a_RK: Tensor,
        b_OR: Tensor,
        bias: Tensor | None,
        packed: Tensor,
        state: PackedState,
        scale: float,
        dtypes: LoraDtypes,
    ) -> Tensor:
        needs_x, needs_a, needs_b = ctx.needs_input_grad[:3]
        branch_dtype = _branch_dtype(dtypes)
        with autocast_off(x):
            x_TK = x.reshape(-1, x.shape[-1]).to(dtypes.compute)
            y_TO = base_product(x_TK, packed, bias, state)
            xa_TR = matmul(x_TK.to(branch_dtype), a_RK.to(branch_dtype).t()) if needs_b else None
        ctx.save_for_backward(
            packed if needs_x else None, a_RK, b_OR, xa_TR, x_TK if needs_a else None
        )
        ctx.state = state
        ctx.scale = scale
        ctx.dtypes = dtypes
        ctx.x_shape = x.shape
        ctx.x_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y_TO.to(dtypes.output).view(*x.shape[:-1], y_TO.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("served_linear")
        packed, a_RK, b_OR, xa_TR, x_TK = ctx.saved_tensors
        needs_bias = ctx.needs_input_grad[3]
        branch_dtype = _branch_dtype(ctx.dtypes)
        dx = da = db = dbias = None
        with autocast_off(dy):
            dy_TO = dy.reshape(-1, dy.shape[-1])
            dy_compute_TO = dy_TO.to(ctx.dtypes.compute)
            dy_branch_TO = dy_TO.to(branch_dtype)
            if needs_bias:
                dbias = bias_gradient(dy_TO, ctx.bias_dtype)
            if xa_TR is not None:
                db = gradient_product(dy_branch_TO, xa_TR, ctx.scale, b_OR.dtype)
            if x_TK is not None:
                dxa_TR = matmul(dy_branch_TO, b_OR.to(branch_dtype))
                da = gradient_product(dxa_TR, x_TK.to(branch_dtype), ctx.scale, a_RK.dtype)
            if packed is not None:
                weight_OK = dequantise_weight(packed, ctx.state, ctx.dtypes.compute)
                dx = matmul(dy_compute_TO, weight_OK).to(ctx.x_dtype).view(ctx.x_shape)
        return dx, da, db, dbias, None, None, None, None


def _branch_dtype(dtypes: LoraDtypes) -> torch.dtype:
    return torch.float32 if dtypes.widens_branch else dtypes.compute


def apply_served(
    x: Tensor, projection: Projection, served: ServedWeight, dtypes: LoraDtypes
) -> Tensor:
    """Computes a LoRA layer with the rounded weight that the exported file will contain.

    x   any float [..., K]
    ->  dtypes.output [..., O]
    """
    packed, state = served.round_weight(projection)
    y: Tensor = ServedLinear.apply(
        x,
        projection.a,
        projection.b,
        projection.bias,
        packed,
        state,
        projection.scale,
        dtypes,
    )
    return y
