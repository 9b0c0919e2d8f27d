"""The op `experts` computes all experts of a mixture-of-experts layer whose weights are stacked.
The weights may be frozen or trained. The two layers of the experts may have LoRA adapters.

The rows are sorted by expert at the start. The rows of each expert are then multiplied by its
matrix. On a GPU, one grouped matrix multiplication handles all experts. On a CPU, there is one
matrix product per expert. The op computes only a few experts at a time, so that fewer activations
are in memory at once.

The gradient of a routing weight is the inner product of the expert's result and the incoming
gradient. It is computed as <h, dh>, plus <d, bias> if there is a bias. Here h is the input of the
second layer, dh the gradient of h without the routing weight, and d the incoming gradient. With
this formula, the outputs of the experts need not be saved, and no value is divided by a routing
weight.

These tensors are saved for backward: x, the order of the rows, the output of the first layer, x Aᵀ
and h Aᵀ (rows x rank), and A and B in the dtype of the matrix products.

T is the number of tokens, C the number of experts per token, and E the number of experts. S = T C
is the number of rows, which are sorted by expert. H is the number of features, G the number of
output features of the first layer, I the number of inner features, and R the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ..backend import (
    apply_function,
    arithmetic_dtype,
    autocast_off,
    product_dtype,
    refuse_second_derivative,
)
from ..contract import OpContract
from ..packed import StackState
from ..recomputed_layer import is_output_unused, placeholder_tensor, running_checkpointed_layers
from .activation import (
    Activation,
    Clamped,
    activation_backward,
    activation_reference,
    apply_activation,
    scale_rows,
)
from .groups import RowPart, SortedRows

EXPERTS = OpContract(
    "x: X[t h], index: int[t c], weights: W[t c], up: U[e g h], down: D[e h i] -> X[t h]",
    inside=(
        "the products' dtype: autocast's, else what x, up and down promote to; sums over experts in"
        " fp32"
    ),
    grads={"x": "X", "weights": "W", "up": "U", "down": "D"},
    autocast="ignored",
)
"""The output has the dtype of x also under autocast, as in transformers. The products follow
autocast.
"""


class Adapter(NamedTuple):
    """The LoRA adapter of one layer of all experts. It consists of a [E R N] and b [E O R], which
    may have any strides. The matrix product of a and b is multiplied by `scale`.
    """

    a: Tensor
    b: Tensor
    scale: float


class ExpertsOptions(NamedTuple):
    """The options of a call. `states` has one entry for each stack of weights: its state if the
    stack is packed (quantised), or None if it is not.

    transposed  whether the stacked matrices are stored as [in out]
    scales      the scales of the adapters of `up` and `down`
    """

    activation: Activation
    transposed: bool
    scales: tuple[float, float]
    states: tuple[StackState | None, StackState | None] = (None, None)


# --- reference


def experts_reference(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_adapter: Adapter | None = None,
    down_adapter: Adapter | None = None,
    activation: Activation = "silu",
    transposed: bool = False,
) -> Tensor:
    """Computes `experts` in plain PyTorch, one expert after the other. It also supports fp64
    inputs.
    """
    dtype = product_dtype(x, up, down)
    y = torch.zeros(x.shape, dtype=arithmetic_dtype(dtype), device=x.device)
    with autocast_off(x):
        for expert in range(up.shape[0]):
            token, choice = torch.where(index == expert)
            h = x[token].to(dtype)
            for weight, bias, adapter, is_first in (
                (up, up_bias, up_adapter, True),
                (down, down_bias, down_adapter, False),
            ):
                matrix = weight[expert].to(dtype)
                if not transposed:
                    matrix = matrix.t()
                output = h @ matrix
                if adapter is not None:
                    a = adapter.a[expert].to(dtype)
                    b = adapter.b[expert].to(dtype)
                    output = output + adapter.scale * (h @ a.t()) @ b.t()
                if bias is not None:
                    output = output + bias[expert].to(dtype)
                h = output
                if is_first:
                    h = activation_reference(output, activation)
            y = y.index_add(0, token, h.to(y.dtype) * weights[token, choice, None].to(y.dtype))
        return y.to(x.dtype)


# --- the op


def _product(
    part: RowPart,
    x: Tensor,
    stack: Tensor,
    options: ExpertsOptions,
    layer_index: int,
    *,
    transpose: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies each row of x by the matrix of its expert, or by the transposed matrix. Only this
    function reads the stacks of weights. Weights of another dtype are cast to the dtype of x. Only
    the weights that this part needs are cast. Packed (quantised) weights are dequantised for a few
    experts at a time, to save memory.
    """
    state = options.states[layer_index]
    if state is None:
        weight = stack[part.experts]
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if options.transposed == transpose:
            weight = weight.transpose(1, 2)
        return part.multiply(x, weight, out=out)

    def read(experts: slice) -> Tensor:
        widened = state.dequantise_experts(stack, experts, x.dtype)
        if transpose:
            return widened
        return widened.transpose(1, 2)

    if out is None:
        _, rows, columns = state.shape
        features = columns
        if options.transposed == transpose:
            features = rows
        out = x.new_empty(len(x), features)
    return part.multiply_packed(x, read, out)


class Experts(torch.autograd.Function):
    """The autograd function of `experts`. The caller passes the dtype of the matrix products as an
    argument.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        index_TC: Tensor,
        weights_TC: Tensor,
        options: ExpertsOptions,
        dtype: torch.dtype,
        up: Tensor,
        up_bias: Tensor | None,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
    ) -> Tensor:
        layers = (up, up_bias, up_a, up_b, down, down_bias, down_a, down_b)
        needs_gradients = any(ctx.needs_input_grad)
        is_unused = bool(running_checkpointed_layers) and is_output_unused(ctx)
        with autocast_off(x_TH):
            shape = _stack_shape(up, options.states[0])
            groups = SortedRows(index_TC, shape[0], dtype, packed=options.states != (None, None))
            compute_TH = x_TH.to(dtype)
            w_S = weights_TC.reshape(-1)[groups.order].to(arithmetic_dtype(dtype))
            (a1, b1), (a2, b2) = (
                groups.cast_adapter(up_a, up_b, dtype),
                groups.cast_adapter(down_a, down_b, dtype),
            )
            rows = groups.order.shape[0]
            # for each row backward reads the first layer's output, and the products of the inputs of
            # both layers with their A
            g_SG = xa_SR = ha_SR = None
            if needs_gradients:
                _, outputs, inputs = shape
                if options.transposed:
                    outputs = inputs
                g_SG = compute_TH.new_empty(rows, outputs)
                if a1 is not None:
                    xa_SR = compute_TH.new_empty(rows, a1.shape[1])
                if a2 is not None:
                    ha_SR = compute_TH.new_empty(rows, a2.shape[1])
            if is_unused:
                total = None
            else:
                total = torch.zeros(x_TH.shape, dtype=arithmetic_dtype(dtype), device=x_TH.device)
            for part in groups.parts():
                part_x = part.gather_rows(compute_TH)
                out = None
                if g_SG is not None:
                    out = g_SG[part.rows]
                g, xa = _forward_layer(part, part_x, (up, up_bias, a1, b1), options, 0, out=out)
                if total is not None or a2 is not None:
                    h = apply_activation(g, options.activation)
                else:
                    h = None
                if total is not None:
                    assert h is not None
                    down_output, ha = _forward_layer(part, h, (down, down_bias, a2, b2), options, 1)
                    part.scatter_add_(total, down_output, w_S[part.rows])
                elif a2 is not None:
                    assert h is not None
                    ha = part.shrink(h, a2)
                if xa_SR is not None and xa is not None:
                    xa_SR[part.rows] = xa
                if ha_SR is not None and ha is not None:
                    ha_SR[part.rows] = ha
        if needs_gradients:
            ctx.save_for_backward(compute_TH, w_S, g_SG, xa_SR, ha_SR, a1, b1, a2, b2, *layers)
            ctx.settings = options, dtype, groups, x_TH.dtype, weights_TC.dtype, weights_TC.shape
        if total is None:
            return placeholder_tensor(tuple(x_TH.shape), x_TH, x_TH.dtype)
        return total.to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("experts")
        (
            x_TH,
            w_S,
            g_SG,
            xa_SR,
            ha_SR,
            a1,
            b1,
            a2,
            b2,
            up,
            up_bias,
            up_a,
            up_b,
            down,
            down_bias,
            down_a,
            down_b,
        ) = ctx.saved_tensors
        options, dtype, groups, x_dtype, w_dtype, w_shape = ctx.settings
        (
            needs_x,
            _,
            needs_w,
            _,
            _,
            needs_up,
            needs_up_bias,
            needs_up_a,
            needs_up_b,
            needs_down,
            needs_down_bias,
            needs_down_a,
            needs_down_b,
        ) = ctx.needs_input_grad
        up_gradients = _Gradients(
            (up, up_bias, up_a, up_b),
            (needs_up, needs_up_bias, needs_up_a, needs_up_b),
            options.transposed,
        )
        down_gradients = _Gradients(
            (down, down_bias, down_a, down_b),
            (needs_down, needs_down_bias, needs_down_a, needs_down_b),
            options.transposed,
        )
        with autocast_off(dy):
            dy_TH = dy.to(dtype)
            if needs_x:
                dx_TH = torch.zeros(x_TH.shape, dtype=arithmetic_dtype(dtype), device=x_TH.device)
            else:
                dx_TH = None
            dw_S = torch.empty_like(w_S)
            for part in groups.parts():
                rows = part.rows
                w = w_S[rows]
                d = part.gather_rows(dy_TH)
                g = g_SG[rows]
                dh, dha = _input_gradient(part, d, down, a2, b2, options, 1)
                dg, h, dw = activation_backward(
                    g, dh, w, options.activation, needs_h=needs_down or needs_down_a
                )
                del dh
                if down_bias is None:
                    dw_S[rows] = dw
                else:
                    dw_S[rows] = dw + part.bias_inner_products(d, down_bias)
                down_gradients.add(part, h, d, w, ha_SR, dha, options.scales[1])
                del h
                part_dx, dxa = _input_gradient(
                    part, dg, up, a1, b1, options, 0, needs_input=needs_x
                )
                part_x = None
                if needs_up or needs_up_a:
                    part_x = part.gather_rows(x_TH)
                up_gradients.add(part, part_x, dg, None, xa_SR, dxa, options.scales[0])
                if dx_TH is not None:
                    assert part_dx is not None
                    part.scatter_add_(dx_TH, part_dx, None)
                # freed before the tensors of the next part are computed
                del d, dg, part_x, part_dx
            dweights = None
            if needs_w:
                ordered = torch.empty_like(dw_S).index_put_((groups.order,), dw_S)
                dweights = ordered.view(w_shape).to(w_dtype)
            if dx_TH is not None:
                dx_TH = dx_TH.to(x_dtype)
        layer_gradients = (*up_gradients.results(), *down_gradients.results())
        return dx_TH, None, dweights, None, None, *layer_gradients


# (stacked weights, biases, A, B) of the first or the second layer of all experts
Layer = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _forward_layer(
    part: RowPart,
    x: Tensor,
    layer: Layer,
    options: ExpertsOptions,
    layer_index: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns (x W + bias + scale (x Aᵀ) Bᵀ, x Aᵀ). Each row of x is multiplied by the matrices of
    the expert that it is sent to.
    """
    weight, bias, a, b = layer
    y = _product(part, x, weight, options, layer_index, out=out)
    xa = None
    if a is not None and b is not None:
        xa = part.shrink(x, a)
        part.expand_(y, xa, b, options.scales[layer_index])
    if bias is not None:
        part.add_bias_(y, bias)
    return y, xa


def _input_gradient(
    part: RowPart,
    dy: Tensor,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    options: ExpertsOptions,
    layer_index: int,
    *,
    needs_input: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns (the gradient of the layer's input, or None if it is not needed; the gradient of x
    Aᵀ, not yet multiplied by the scale).
    """
    dxa = None
    if b is not None:
        dxa = part.shrink(dy, b.transpose(1, 2))
    if not needs_input:
        # a caller without needs_input does not read the first result
        return None, dxa  # type: ignore[return-value]
    dx = _product(part, dy, weight, options, layer_index, transpose=True)
    if dxa is not None:
        scale = options.scales[layer_index]
        # an adapter has both A and B
        part.expand_(dx, dxa, a.transpose(1, 2), scale)  # type: ignore[union-attr]
    return dx, dxa


class _Gradients:
    """The gradients of one layer's weight, bias, A and B. `add` computes the gradients of a few
    experts at a time. The gradients of an expert without rows are zero.
    """

    def __init__(self, layer: Layer, needs: Sequence[bool], transposed: bool) -> None:
        self.transposed = transposed
        self.layer = layer
        weight, bias, a, b = layer
        needs_weight, needs_bias, needs_a, needs_b = needs
        self.weight = self.bias = self.a = self.b = None
        if needs_weight:
            self.weight = torch.zeros_like(weight)
        if needs_bias and bias is not None:
            self.bias = torch.zeros_like(bias)
        # the gradients of A and B are summed in fp32
        if needs_a and a is not None:
            self.a = _wide_zeros(a, a.shape)
        if needs_b and b is not None:
            # B's gradient has the memory layout of PEFT's parameter, in which the expert is the
            # last dimension
            experts, features, rank = b.shape
            self.b = _wide_zeros(b, (features, rank, experts)).permute(2, 0, 1)

    def add(
        self,
        part: RowPart,
        x: Tensor | None,
        dy: Tensor,
        w: Tensor | None,
        xa_SR: Tensor | None,
        dxa: Tensor | None,
        scale: float,
    ) -> None:
        """Computes the gradients for the experts in `part`. x may be None if neither the gradient
        of the weight nor the gradient of A is needed. dy is multiplied by w before it is used.
        """
        experts = part.experts
        if self.bias is not None:
            part.bias_sums(dy, w, self.bias[experts])
        if self.weight is not None:
            assert x is not None
            lhs = dy
            rhs = x
            if w is not None:
                rhs = scale_rows(x, w)
            if self.transposed:
                lhs, rhs = rhs, lhs
            part.outer_products(lhs, rhs, self.weight[experts])
        if self.a is not None:
            assert dxa is not None
            assert x is not None
            if w is not None:
                dxa = scale_rows(dxa, w)
            part.gradient(dxa, x, scale, self.a[experts])
        if self.b is not None:
            assert xa_SR is not None
            xa = xa_SR[part.rows]
            if w is not None:
                xa = scale_rows(xa, w)
            part.gradient(dy, xa, scale, self.b[experts])

    def results(self) -> list[Tensor | None]:
        """Returns each gradient in the dtype of its tensor. A gradient that is not needed is None."""
        results: list[Tensor | None] = []
        for gradient, tensor in zip((self.weight, self.bias, self.a, self.b), self.layer):
            if gradient is not None and tensor is not None:
                gradient = gradient.to(tensor.dtype)
            results.append(gradient)
        return results


def _wide_zeros(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=arithmetic_dtype(like.dtype), device=like.device)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_adapter: Adapter | None = None,
    down_adapter: Adapter | None = None,
    up_state: StackState | None = None,
    down_state: StackState | None = None,
    activation: Activation = "silu",
    transposed: bool = False,
) -> Tensor:
    """For each token, computes the sum of weight * down(activation(up(x))) over its experts.

    x           X[t h]
    index       int[t c]   the experts of each token
    weights     W[t c]     the routing weights of these experts
    up, down    U[e g h], D[e h i]; with `transposed` U[e h g], D[e i h]
    up_bias, down_bias      [e g], [e h], or None
    up_adapter, down_adapter  LoRA, or None
    up_state, down_state  states of packed stacks, or None; with a state, `up` or `down` contains
                          packed bytes and is frozen, and an expert is dequantised when its rows are
                          multiplied
    activation  "silu", "gelu" or "gelu_tanh": the activation of the first half of g times the
                second half; `Clamped`, on even and odd columns; or any function [s g] -> [s i]
                without trained parameters
    ->          X[t h]     the dtype of x, also under autocast
    inside      matrix products in autocast's dtype, or without autocast in the promoted dtype of x
                and the stacks that are not packed; sums over experts and the gradients of an
                adapter in fp32
    grads       each in the dtype of its tensor
    Raises      ShapeError SH001; DtypeError DT001 for an index that is not an integer
    """
    states = up_state, down_state
    _check_arguments(
        x, index, weights, _stack_shape(up, up_state), _stack_shape(down, down_state), transposed
    )
    layers: list[Tensor | None] = []
    scales: list[float] = []
    for stack, bias, adapter in ((up, up_bias, up_adapter), (down, down_bias, down_adapter)):
        if adapter is None:
            layers += [stack, bias, None, None]
            scales.append(1.0)
        else:
            layers += [stack, bias, adapter.a, adapter.b]
            scales.append(adapter.scale)
    options = ExpertsOptions(activation, transposed, (scales[0], scales[1]), states)
    dense = [stack for stack, state in zip((up, down), states) if state is None]
    output: Tensor = apply_function(
        Experts, x, index, weights, options, product_dtype(x, *dense), *layers
    )
    return output


def _stack_shape(stack: Tensor, state: StackState | None) -> torch.Size:
    if state is None:
        return stack.shape
    return state.shape


def _check_arguments(
    x: Tensor, index: Tensor, weights: Tensor, up: torch.Size, down: torch.Size, transposed: bool
) -> None:
    if index.is_floating_point():
        raise DtypeError(
            f"index is {index.dtype}, declared an integer", code="DT001", fix="index.long()"
        )
    input_dim, output_dim = (1, 2) if transposed else (2, 1)
    has_matching_rows = (
        x.dim() == 2
        and len(up) == len(down) == 3
        and index.shape == weights.shape
        and index.shape[:1] == x.shape[:1]
    )
    if (
        not has_matching_rows
        or up[input_dim] != x.shape[1]
        or down[output_dim] != x.shape[1]
        or up[0] != down[0]
    ):
        raise ShapeError(
            f"x is {list(x.shape)}, index {list(index.shape)}, weights {list(weights.shape)}, up"
            f" {list(up)}, down {list(down)}, declared [t h], [t c], [t c],"
            f" {'[e h g], [e i h]' if transposed else '[e g h], [e h i]'}",
            code="SH001",
        )


__all__ = ["EXPERTS", "Adapter", "Clamped", "experts", "experts_reference"]
