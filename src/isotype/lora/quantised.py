"""Computes matrix products with packed (quantised) weights, and defines linear layers with packed
weights. This module also manages the dequantised copy of a weight that backward needs.

A packed weight is a tensor of bytes with a state. The state has the weight's shape and can
dequantise the weight (`ops.packed`). The format is bitsandbytes' 4-bit format, or the format in
which a checkpoint was published. Nothing in this module depends on the format.

Forward and backward each dequantise a weight before they multiply by it. With gradient
checkpointing on a CPU, backward uses the copy that the recompute made, and then frees it. So a step
dequantises each weight twice instead of three times. Between recompute and backward, the
dequantised weights of one decoder layer stay in memory. On a GPU, dequantisation is one kernel
launch, which reaches 85% of the memory bandwidth and takes 1% of a training step of Llama-3.1-8B.
On a GPU, a copy that is kept would take 318 MB of memory. So backward dequantises the weight again.

T is the number of tokens, K the number of input features, and O the number of output features.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.backend import autocast_off, refuse_second_derivative, uses_fused_kernel
from ..ops.packed import PackedState, dequantise_packed
from ..ops.recomputed_layer import RecomputedLayer, current_layer
from ..ops.widened_products import linear, matmul, widens_products

_SHARED_COPY = "_isotype_wide"  # attribute of a weight's state with its dequantised copy


class NotCopied:
    """Base class of values that belong to one layer, such as a cache. If the layer is copied or
    pickled, the copy has None in place of such a value.
    """

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class SharedCopy(NotCopied):
    """A dequantised weight that is kept until backward has used it `remaining_uses` times."""

    def __init__(self, weight: Tensor, packed: Tensor) -> None:
        self.weight = weight
        self.version = packed._version
        self.remaining_uses = 0

    def matches(self, packed: Tensor, dtype: torch.dtype) -> bool:
        return (
            self.weight.dtype == dtype
            and self.version == packed._version
            and self.weight.device == packed.device
        )


def packed_product(x_TK: Tensor, packed: Tensor, state: Any, bias: Tensor | None) -> Tensor:
    """Computes x @ Wᵀ + bias in the dtype of x, with the dequantised weight. If a checkpointed
    layer is recomputed on a CPU, the function keeps its dequantised copy of W, and backward uses
    this copy too.

    For its 4-bit formats, bitsandbytes has kernels that need no dequantised copy. These kernels run
    on a CPU with bf16 instructions. On a GPU, they run if x is a single row, as when one token is
    generated.
    """
    is_gpu_batch = uses_fused_kernel("packed", packed) and x_TK.numel() > x_TK.shape[-1]
    # without bf16 instructions, bitsandbytes dequantises W and calls PyTorch's slow bf16 product
    if (
        isinstance(state, PackedState)
        or is_gpu_batch
        or _keeps_copy(packed)
        or widens_products(x_TK)
    ):
        return linear(x_TK, dequantise_for_forward(packed, state, x_TK.dtype), bias)
    import bitsandbytes

    # [1, bytes], as bitsandbytes' own layer passes it: before 0.50, bitsandbytes would take
    # [bytes, 1] for the transposed weight
    product: Tensor = bitsandbytes.matmul_4bit(
        x_TK, packed.view(1, -1), quant_state=state, bias=bias
    )
    return product


def dequantise_for_forward(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Returns W in `dtype`. If a checkpointed layer is recomputed on a CPU, the dequantised copy is
    kept for backward.

    packed  uint8[...]
    ->      dtype[O K]
    """
    if _keeps_copy(packed):
        return _use_shared_copy(packed, state, dtype)
    return dequantise_packed(packed, state, dtype)


def _keeps_copy(packed: Tensor) -> bool:
    """Whether this forward recomputes a checkpointed layer on a CPU, so that backward needs the
    same dequantised weight soon.
    """
    return is_recomputing() and not uses_fused_kernel("packed", packed)


def dequantise_weight(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Returns W in `dtype`, with the same values as in forward. If the recompute of gradient
    checkpointing kept a dequantised copy, this copy is returned.

    packed  uint8[...]
    ->      dtype[O K]
    """
    copy: SharedCopy | None = getattr(state, _SHARED_COPY, None)
    if copy is None or not copy.matches(packed, dtype):
        return dequantise_packed(packed, state, dtype)
    copy.remaining_uses -= 1
    if copy.remaining_uses <= 0:
        delattr(state, _SHARED_COPY)
    return copy.weight


def bias_gradient(dy_TO: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of a bias in `dtype`, summed in fp32."""
    return dy_TO.sum(0, dtype=torch.promote_types(torch.float32, dy_TO.dtype)).to(dtype)


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward. If it does, gradient checkpointing is
    recomputing the forward of a layer, and the backward of this layer runs next.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _LayerCopies:
    """The states with a dequantised copy that the current recomputed layer made.

    A copy is left if no backward reads it, as for a layer whose input needs no gradient (the
    modulation of a denoiser) or whose output is not used. Such copies are freed when the next layer
    is recomputed.
    """

    layer: RecomputedLayer | None = None
    states: ClassVar[list[Any]] = []

    @classmethod
    def add(cls, state: Any) -> None:
        layer = current_layer()
        if layer is not cls.layer:
            cls.free()
            cls.layer = layer
        cls.states.append(state)

    @classmethod
    def free(cls) -> None:
        for state in cls.states:
            if hasattr(state, _SHARED_COPY):
                delattr(state, _SHARED_COPY)
        cls.states.clear()
        cls.layer = None


def _use_shared_copy(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    copy: SharedCopy | None = getattr(state, _SHARED_COPY, None)
    if copy is None or not copy.matches(packed, dtype):
        copy = SharedCopy(dequantise_packed(packed, state, dtype), packed)
        setattr(state, _SHARED_COPY, copy)
        _LayerCopies.add(state)
        torch.autograd.Variable._execution_engine.queue_callback(_LayerCopies.free)
    copy.remaining_uses += 1
    return copy.weight


class LinearPacked(torch.autograd.Function):
    """Computes x Wᵀ + bias for a frozen packed W. It saves only the packed weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.save_for_backward(packed if ctx.needs_input_grad[0] else None)
        ctx.state = state
        ctx.bias_dtype = None
        if bias is not None:
            ctx.bias_dtype = bias.dtype
            bias = bias.to(x.dtype)
        with autocast_off(x):
            return packed_product(x, packed, state, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_packed")
        (packed,) = ctx.saved_tensors
        dx = dbias = None
        with autocast_off(dy):
            if packed is not None:
                weight_OK = dequantise_weight(packed, ctx.state, dy.dtype)
                dx = matmul(dy.reshape(-1, dy.shape[-1]), weight_OK)
                dx = dx.view(*dy.shape[:-1], weight_OK.shape[1])
            if ctx.needs_input_grad[2]:
                dbias = bias_gradient(dy.flatten(0, -2), ctx.bias_dtype)
        return dx, None, dbias, None


def forward_4bit(self: Any, x: Tensor) -> Tensor:
    """Replaces the forward of bitsandbytes' 4-bit layer, with the same result. It avoids three
    effects of bitsandbytes' forward. On a CPU, the first call without gradients permanently repacks
    the weight. The stored bias is cast to the compute dtype. Backward always dequantises the weight
    again.
    """
    if packed_state_blocker(self) is not None:
        output: Tensor = type(self).forward(self, x)
        return output
    if not self.compute_type_is_set:
        fix_compute_dtype(self, x)
    product: Tensor = LinearPacked.apply(
        x.to(self.compute_dtype or x.dtype), self.weight, self.bias, self.weight.quant_state
    )
    return product.to(x.dtype)


def fix_compute_dtype(layer: Any, x: Tensor) -> None:
    """Sets the compute dtype as bitsandbytes' layer does. If the user did not set one, it is the
    dtype of the first input.
    """
    layer.set_compute_type(x)
    layer.compute_type_is_set = True


class PackedWeight(nn.Parameter):
    """The bytes of a frozen packed weight, uint8[n], with its `quant_state`. Code that casts
    floating-point tensors does not change these weights, because they are bytes.
    """

    quant_state: PackedState

    def __new__(cls, packed: Tensor, state: PackedState) -> PackedWeight:
        parameter = torch.Tensor._make_subclass(
            cls, packed.detach().contiguous().view(-1).view(torch.uint8), False
        )
        parameter.quant_state = state
        return parameter

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the dequantised weight. The attribute's name is from DeepSpeed. PEFT reads
        it to learn the real shape of a weight.
        """
        return self.quant_state.shape

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        if id(self) not in memo:
            memo[id(self)] = PackedWeight(
                self.data.clone(), self.quant_state.map_tensors(torch.clone)
            )
        copied: PackedWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return PackedWeight, (self.data, self.quant_state)


class PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight. It is a subclass of nn.Linear, so that PEFT and
    other libraries that look for linear layers find it.

    compute_dtype  the dtype of the matrix multiplication; None means the input's dtype. The result
                   has the input's dtype, as in bitsandbytes' layers
    """

    weight: PackedWeight

    def __init__(
        self,
        in_features: int,
        out_features: int,
        packed: Tensor,
        state: PackedState,
        bias: Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = PackedWeight(packed, state)
        self.register_parameter(
            "bias", None if bias is None else nn.Parameter(bias, requires_grad=False)
        )
        self.compute_dtype: torch.dtype | None = None
        # a flag of bitsandbytes' layers; true, since the first input does not decide the compute
        # dtype
        self.compute_type_is_set = True

    def forward(self, x: Tensor) -> Tensor:
        """Computes x: F[*n K] -> F[*n O]. The gradient of x is computed with the dequantised
        weight.
        """
        product: Tensor = LinearPacked.apply(
            x.to(self.compute_dtype or x.dtype), self.weight, self.bias, self.weight.quant_state
        )
        return product.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        state = self.weight.quant_state
        super()._apply(fn, recurse)
        # a move to or from the meta device creates another Parameter
        self.weight.quant_state = state.to_device(self.weight.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.weight.quant_state.dtype_name}"


def is_4bit(module: nn.Module) -> bool:
    """Whether this is a 4-bit layer of bitsandbytes. Types must match exactly, since a subclass may
    compute something else.
    """
    layer_type = type(module)
    return layer_type.__name__ in (
        "Linear4bit",
        "LinearNF4",
        "LinearFP4",
    ) and layer_type.__module__.startswith("bitsandbytes.")


def is_packed(module: nn.Module) -> bool:
    """Whether this is a linear layer with a packed weight that the fused functions support."""
    return type(module) is PackedLinear or is_4bit(module)


def packed_state_blocker(base: Any) -> str | None:
    """Returns the reason why the functions of this module cannot use the current weight of this
    packed layer, or None if they can.
    """
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return "the weight is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has repacked the weight for inference on a CPU"
    if tuple(state.shape) != (base.out_features, base.in_features):
        return "the weight was quantised transposed"
    return None
