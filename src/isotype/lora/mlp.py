"""`lora_mlp`: down(activation(gate(x)) * up(x)) with LoRA on any of the three, in one autograd
function.

Saved for backward: x, gate's and up's outputs, and tokens x rank; not the activation and not the
product, which one pass in backward computes again together with their gradients. Gate and up may be
one layer of twice the width.

In a layer that is recomputed, backward owns gate's and up's outputs: on a GPU their gradients are
written over them, and the product and its gradient exist for one tile of tokens at a time, so that
two tensors of tokens x inner features are alive instead of six. The recompute leaves down's base
product out where nothing reads the layer's output again: backward needs its input's product with A
and nothing else.

T tokens, K in features, I inner features, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.backend import (
    apply_function,
    autocast_off,
    direct_apply,
    disable_autocast,
    refuse_second_derivative,
    unsafe_view,
    uses_fused_kernel,
)
from ..ops.gated import Gated, gated_gradients, gated_gradients_, gated_product
from ..ops.recomputed_layer import (
    is_output_unused,
    is_recomputed,
    layers_running,
    placeholder_tensor,
)
from .attach import (
    FUSED,
    HOOKS_OF_ALL,
    PRE_HOOKS_OF_ALL,
    bare_projection,
    bare_reason,
    decided,
    dtypes_of,
    has_hooks,
    is_fused,
    is_lora,
    projection,
    shared_dtypes,
    why_not_fused,
)
from .group import (
    TENSORS,
    Branches,
    Narrow,
    all_none,
    branch_gradient,
    branches,
    flattened,
    input_gradient,
    multiply,
    parts,
    tensor_gradients,
    wants_input,
)
from .linear import (
    LoraDtypes,
    Projection,
    base_weight,
    dropout_mask,
    dropped_scale,
    out_features,
)
from .products import at_once, cast_down, product_fp32, scaled_product

# Tokens of a tile: a product of 2,048 x 4,096 x 14,336 is 0.3 ms on an H200, 50 launches, and 896
# tiles of 128 x 256 for its 132 multiprocessors. Gate, up and the gradient of their product are 56
# MB each then
TILE = 2048


def halves(ys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(gate, up) of two layers' outputs, or of one layer's."""
    gate, up = ys if len(ys) == 2 else ys[0].chunk(2, dim=-1)
    return gate, up


def _tiles(tokens: int) -> Iterator[slice]:
    return (slice(start, min(start + TILE, tokens)) for start in range(0, max(tokens, 1), TILE))


def _forward(
    kind: Gated,
    x_TK: Tensor,
    flat: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
    *,
    unused: bool = False,
    down: tuple[Narrow | None, Narrow | None] = (None, None),
    now: bool = False,
) -> tuple[list[Tensor], Branches, Branches, Tensor]:
    """(gate and up, what backward needs of them and of down, the output, or no values where it is
    unused).

    down  `_adapters`, where they are cast for all tiles
    """
    ys, inner = multiply(x_TK, flat[:-TENSORS], scales[:-1], states[:-1], down[0], now=now)
    gate, up = halves(ys)
    if unused:
        weight = flat[-TENSORS]
        assert weight is not None
        output = placeholder_tensor(
            (x_TK.shape[0], out_features(weight, states[-1])), x_TK, x_TK.dtype
        )
        return ys, inner, _branch_of_product(kind, gate, up, flat[-TENSORS:]), output
    (output,), outer = multiply(
        gated_product(kind, gate, up), flat[-TENSORS:], scales[-1:], states[-1:], down[1], now=now
    )
    return ys, inner, outer, output


def _forward_in_tiles(
    kind: Gated,
    x_TK: Tensor,
    flat: Sequence[Tensor | None],
    scales: Sequence[float],
    states: Sequence[Any],
) -> tuple[list[Tensor], Branches, Branches, Tensor]:
    """As `_forward`, a tile of tokens at a time; gate and up are given as tensors that hold
    nothing.
    """
    # once for all tiles
    down = _adapters(x_TK, flat, states)
    wide = list(flat)
    wide[0::TENSORS] = [
        base_weight(weight, state, x_TK.dtype)
        for weight, state in zip(flat[0::TENSORS], states)
        if weight is not None
    ]
    dense = (None,) * len(states)
    inner_xas = list[Tensor]()
    outer_xas = list[Tensor]()
    outputs = list[Tensor]()
    for rows in _tiles(x_TK.shape[0]):
        # gate and up of one tile at a time: what this gives is dropped with it
        ys, inner, outer, y_TO = _forward(kind, x_TK[rows], wide, scales, dense, down=down)
        widths = [y.shape[1] for y in ys]
        inner_xas.append(inner[0])
        outer_xas.append(outer[0])
        outputs.append(y_TO)
        del ys, y_TO
    empty = [placeholder_tensor((x_TK.shape[0], n), x_TK, x_TK.dtype) for n in widths]
    return (
        empty,
        (torch.cat(inner_xas), *inner[1:]),
        (torch.cat(outer_xas), *outer[1:]),
        torch.cat(outputs),
    )


def _adapters(
    x_TK: Tensor, flat: Sequence[Tensor | None], states: Sequence[Any]
) -> tuple[Narrow, Narrow]:
    """A and B as cast down, of gate and up and of down."""
    widths = [out_features(w, s) for w, s in zip(flat[0::TENSORS], states) if w is not None]
    features = widths[0] if len(widths) == 3 else widths[0] // 2
    dtype = x_TK.dtype
    n = -TENSORS
    return (
        cast_down(flat[2:n:TENSORS], flat[3:n:TENSORS], x_TK, x_TK.shape[1], dtype),
        cast_down(flat[n + 2 : n + 3], flat[n + 3 : n + 4], x_TK, features, dtype),
    )


def _branch_of_product(
    kind: Gated, gate_TI: Tensor, up_TI: Tensor, flat: Sequence[Tensor | None]
) -> Branches:
    """What backward needs of down: its input's product with A, made tile by tile on a GPU, where
    each tile fills the device.
    """
    if flat[4] is not None or not uses_fused_kernel(gate_TI) or gate_TI.shape[0] <= TILE:
        return branches(gated_product(kind, gate_TI, up_TI), flat)
    made = [
        branches(gated_product(kind, gate_TI[rows], up_TI[rows]), flat)
        for rows in _tiles(gate_TI.shape[0])
    ]
    return torch.cat([xa for xa, _, _ in made]), *made[0][1:]


def _gradients_of_down(
    kind: Gated,
    gate_TI: Tensor,
    up_TI: Tensor,
    dy_TK: Tensor,
    ha_TR: Tensor,
    a_RI: Tensor,
    b: Tensor | None,
    weight: Tensor,
    keep: Tensor | None,
    scale: float,
    state: Any,
    needs: Sequence[bool],
    leaves: Sequence[torch.dtype | None],
    compute: torch.dtype,
    *,
    tiled: bool,
    now: bool,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """(gradient of gate's output, of up's, whose product down's input is, those of down's tensors).

    tiled   gate and up are the caller's to overwrite
    """
    narrow_TK = dy_TK.to(compute)
    slices = parts([b])
    keeps = None if keep is None else [keep]
    dha_TR = branch_gradient([narrow_TK], [b], [scale], ha_TR, now=now)
    if (
        not (
            tiled
            and uses_fused_kernel(gate_TI)
            and gate_TI.is_contiguous()
            and up_TI.is_contiguous()
        )
        or needs[0]
    ):
        dh_TI = input_gradient(
            dha_TR, a_RI, [narrow_TK], [weight], [state], keeps, slices, compute, now=now
        )
        dgate_TI, dup_TI, h_TI = gated_gradients(kind, gate_TI, up_TI, dh_TI)
        del dh_TI
        grads = tensor_gradients(
            h_TI,
            ha_TR,
            dha_TR,
            [narrow_TK],
            [dy_TK],
            [scale],
            keeps,
            slices,
            needs,
            leaves,
            now=now,
        )
        return dgate_TI, dup_TI, grads
    # widened once for all tiles; a kept copy of a recompute is this one
    wide = base_weight(weight, state, compute)
    da_fp32: Tensor | None = None
    for rows in _tiles(gate_TI.shape[0]):
        dh_TI = input_gradient(
            dha_TR[rows], a_RI, [narrow_TK[rows]], [wide], [None], keeps, slices, compute, now=now
        )
        _, _, h_TI = gated_gradients_(kind, gate_TI[rows], up_TI[rows], dh_TI)
        if needs[2]:
            part = product_fp32(dha_TR[rows], h_TI)
            da_fp32 = part if da_fp32 is None else da_fp32.add_(part)
        # before the next tile's are made
        del dh_TI, h_TI
    # bias and B read dy and x Aᵀ alone
    small = (needs[0], needs[1], False, needs[3], needs[4])
    grads = tensor_gradients(
        None, ha_TR, dha_TR, [narrow_TK], [dy_TK], [scale], keeps, slices, small, leaves, now=now
    )
    if da_fp32 is not None:
        assert leaves[2] is not None
        grads[2] = da_fp32.to(leaves[2])
    return gate_TI, up_TI, grads


def _backward_can_start_at_x(flat: Sequence[Tensor | None], needs: Sequence[bool]) -> bool:
    """Whether `_gradients_from_x` computes all that is wanted: of x, and of fp32 adapters, whose
    sums over tiles are rounded once.
    """
    adapters = [t for t in (*flat[2::TENSORS], *flat[3::TENSORS]) if t is not None]
    frozen = not any(needs[0::TENSORS]) and all(bias is None for bias in flat[1::TENSORS])
    return (
        frozen and wants_input(needs[:-TENSORS]) and all(t.dtype == torch.float32 for t in adapters)
    )


def _nothing_but_adapters(
    x_TK: Tensor, flat: Sequence[Tensor | None], states: Sequence[Any]
) -> tuple[list[Tensor], Branches, Branches, Tensor]:
    """What a recompute saves for a backward that starts at x: only A and B as cast down. Backward
    computes every tensor of token size.
    """
    tokens = x_TK.shape[0]
    dtype = x_TK.dtype
    widths = [out_features(w, s) for w, s in zip(flat[0::TENSORS], states) if w is not None]
    (a_RK, inner_bs), (a_RI, outer_bs) = _adapters(x_TK, flat, states)
    ys = [placeholder_tensor((tokens, width), x_TK, dtype) for width in widths[:-1]]
    xa_TR, ha_TR = (placeholder_tensor((tokens, a.shape[0]), x_TK, dtype) for a in (a_RK, a_RI))
    return (
        ys,
        (xa_TR, a_RK, inner_bs),
        (ha_TR, a_RI, outer_bs),
        placeholder_tensor((tokens, widths[-1]), x_TK, dtype),
    )


def _gradients_from_x(
    kind: Gated,
    x_TK: Tensor,
    dy_TK: Tensor,
    a_RK: Tensor,
    a_RI: Tensor,
    bs: Sequence[Tensor | None],
    wide: Sequence[Tensor],
    scales: Sequence[float],
    needs: Sequence[bool],
    leaves: Sequence[torch.dtype | None],
    x_dtype: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of x, or None where it has no dtype; those of every tensor): the backward of the
    three layers from x on, where gate, up, their gradients and the product exist for one tile of
    tokens at a time. wide: weights in the products' dtype.
    """
    n = len(bs) - 1
    slices = parts(bs[:-1])
    down = parts(bs[-1:])
    flat: list[Tensor | None] = []
    for weight, b, part in zip(wide, bs[:-1], slices):
        flat += [weight, None, None if b is None else a_RK[part], b, None]
    none: tuple[None, ...] = (None,) * n
    totals: list[Tensor | None] = [None] * len(needs)
    if x_dtype is None:
        dx_TK = None
    else:
        dx_TK = torch.empty(x_TK.shape, dtype=x_dtype, device=x_TK.device)
    for rows in _tiles(x_TK.shape[0]):
        x = x_TK[rows]
        dy = dy_TK[rows].to(x_TK.dtype)
        ys, (xa, _, _) = multiply(x, flat, scales[:-1], none, (a_RK, list(bs[:-1])))
        dha = branch_gradient([dy], bs[-1:], scales[-1:], dy.new_empty(dy.shape[0], a_RI.shape[0]))
        dh = input_gradient(dha, a_RI, [dy], wide[-1:], [None], None, down, x.dtype)
        dgate, dup, h = gated_gradients_(kind, *halves(ys), dh)
        ha = scaled_product(h, a_RI.t()) if a_RI.shape[0] else h[:, :0]
        last = tensor_gradients(
            h, ha, dha, [dy], [dy], scales[-1:], None, down, needs[-TENSORS:], leaves[-TENSORS:]
        )
        dys = [dgate, dup] if n == 2 else [torch.cat((dgate, dup), -1)]
        dxa = branch_gradient(dys, bs[:-1], scales[:-1], xa)
        first = tensor_gradients(
            x, xa, dxa, dys, dys, scales[:-1], None, slices, needs[:-TENSORS], leaves[:-TENSORS]
        )
        for i, grad in enumerate((*first, *last)):
            before = totals[i]
            totals[i] = grad if before is None or grad is None else before.add_(grad)
        if dx_TK is not None:
            dx_TK[rows] = input_gradient(dxa, a_RK, dys, wide[:-1], none, None, slices, dx_TK.dtype)
        # before the next tile's are made
        del ys, dh, dgate, dup, h, dys
    return dx_TK, totals


class LoraMlp(torch.autograd.Function):
    """`lora_mlp`; tensors come flat, TENSORS a projection, down's last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kind: Gated,
        scales: tuple[float, ...],
        states: tuple[Any, ...],
        dtypes: LoraDtypes,
        *flat: Tensor | None,
    ) -> Tensor:
        needs = ctx.needs_input_grad[5:]
        x_TK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        ctx.owns = False
        unused = False
        compute = dtypes.compute
        if layers_running:
            ctx.owns = is_recomputed()
            unused = is_output_unused(ctx)
        now = at_once(compute, x)
        with disable_autocast() if now else autocast_off(x):
            x_TK = x_TK if x_TK.dtype == compute else x_TK.to(compute)
            # the layer will run again, so that what is saved now is dropped: gate, up and product
            # exist for one tile at a time
            tiled = x_TK.shape[0] > TILE and uses_fused_kernel(x_TK) and all_none(flat[4::TENSORS])
            if tiled and unused and _backward_can_start_at_x(flat, needs):
                ys, inner, outer, y_TO = _nothing_but_adapters(x_TK, flat, states)
            elif tiled and ctx.owns:
                ys, inner, outer, y_TO = _forward_in_tiles(kind, x_TK, flat, scales, states)
            else:
                ys, inner, outer, y_TO = _forward(
                    kind, x_TK, flat, scales, states, unused=unused, now=now
                )
        (xa_TR, a_RK, inner_bs), (ha_TR, a_RI, outer_bs) = inner, outer
        saved_x = x_TK if wants_input(needs[:-TENSORS]) else None
        ctx.save_for_backward(
            saved_x,
            xa_TR,
            a_RK,
            ha_TR,
            a_RI,
            *ys,
            *inner_bs,
            *outer_bs,
            *flat[0::TENSORS],
            *flat[4::TENSORS],
        )
        ctx.given = kind, scales, states, compute, x.shape, x.dtype, now
        ctx.leaf_dtypes = [None if t is None else t.dtype for t in flat]
        if x.dim() == 2:
            return y_TO
        return unsafe_view(y_TO, (*x.shape[:-1], y_TO.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative("lora_mlp")
        kind, scales, states, compute, x_shape, x_dtype, now = ctx.given
        needs = ctx.needs_input_grad[5:]
        leaves = ctx.leaf_dtypes
        now = now and not torch._C._len_torch_dispatch_stack()
        x_TK, xa_TR, a_RK, ha_TR, a_RI, *rest = ctx.saved_tensors
        n = len(scales) - 1
        ys = rest[:n]
        bs = rest[n : 2 * n + 1]
        weights = rest[2 * n + 1 : 3 * n + 2]
        keeps = rest[3 * n + 2 :]
        inner_keeps = None if all_none(keeps[:-1]) else keeps[:-1]
        with disable_autocast() if now else autocast_off(dy):
            dy_TK = dy.reshape(-1, dy.shape[-1])
            if x_TK is not None and x_TK.shape[0] > 0 and ys[0].stride(-1) == 0:
                # the recompute has left gate and up out
                wide = [
                    base_weight(weight, state, compute) for weight, state in zip(weights, states)
                ]
                x_dtype = x_dtype if ctx.needs_input_grad[0] else None
                dx_TK, grads = _gradients_from_x(
                    kind, x_TK, dy_TK, a_RK, a_RI, bs, wide, scales, needs, leaves, x_dtype
                )
                return (
                    None if dx_TK is None else dx_TK.view(x_shape),
                    None,
                    None,
                    None,
                    None,
                    *grads,
                )
            dgate_TI, dup_TI, last = _gradients_of_down(
                kind,
                *halves(ys),
                dy_TK,
                ha_TR,
                a_RI,
                bs[-1],
                weights[-1],
                keeps[-1],
                scales[-1],
                states[-1],
                needs[-TENSORS:],
                leaves[-TENSORS:],
                compute,
                tiled=ctx.owns and keeps[-1] is None and n == 2,
                now=now,
            )
            dys = [dgate_TI, dup_TI] if n == 2 else [torch.cat((dgate_TI, dup_TI), -1)]
            slices = parts(bs[:-1])
            dxa_TR = branch_gradient(dys, bs[:-1], scales[:-1], xa_TR, now=now)
            first = tensor_gradients(
                x_TK,
                xa_TR,
                dxa_TR,
                dys,
                dys,
                scales[:-1],
                inner_keeps,
                slices,
                needs[:-TENSORS],
                leaves[:-TENSORS],
                now=now,
            )
            dx = None
            if ctx.needs_input_grad[0]:
                dx = input_gradient(
                    dxa_TR,
                    a_RK,
                    dys,
                    weights[:-1],
                    states[:-1],
                    inner_keeps,
                    slices,
                    x_dtype,
                    now=now,
                ).view(x_shape)
        return dx, None, None, None, None, *first, *last


_apply = direct_apply(LoraMlp)


def lora_mlp(
    x: Tensor,
    inner: Sequence[Projection],
    down: Projection,
    kind: Gated,
    dtypes: LoraDtypes,
    *,
    now: bool = False,
) -> Tensor:
    """down(activation(gate) * up), where gate and up are `inner`'s two outputs, or the halves of
    its one.

    x       any float [*n K]
    ->      Y[*n K]   the one dtype that all three layers compute and answer in
    grads   each in its tensor's dtype; adapter gradients are summed in fp32

    now  it is neither under torch.func nor in a graph
    """
    assert not dtypes.wide
    assert dtypes.out == dtypes.compute
    flat, scales, states = flattened(x, inner)
    keep = None
    scale = down.scale
    if down.dropout:
        # the product that is dropped from is not made yet: of it only the shape and the device
        # count
        keep = dropout_mask(
            torch.empty((*x.shape[:-1], down.features), dtype=torch.bool, device=x.device),
            down.dropout,
        )
        keep = keep.reshape(-1, down.features)
        scale = dropped_scale(scale, down.dropout)
    flat += (down.weight, down.bias, down.a, down.b, keep)
    given = (x, kind, (*scales, scale), (*states, down.quant_state), dtypes, *flat)
    out: Tensor = _apply(*given) if now else apply_function(LoraMlp, *given)
    return out


# --- over a model's own layers


def why_not_one(layers: Sequence[Any]) -> str | None:
    """Why these layers (gate, up, down; or gate and up in one, down) do not run as one function, or
    None.
    """
    adapted = 0
    for layer in layers:
        if has_hooks(layer):
            return "a hook on a layer"
        if is_lora(layer):
            if not is_fused(layer):
                return "a LoRA layer that is not fused"
            reason = why_not_fused(layer)
            adapted += 1
        else:
            reason = bare_reason(layer)
        if reason is not None:
            return reason
    return None if adapted else "no LoRA layer"


def run_gated(layers: Sequence[Any], x: Tensor, kind: Gated) -> Tensor | None:
    """down(activation(gate(x)) * up(x)) in one function, or None where the layers have to be
    called: always PEFT's result.
    """
    graph = torch.compiler.is_dynamo_compiling()
    if not x.dtype.is_floating_point:
        return None
    calls = []
    adapted = False
    for layer in layers:
        hooks = (
            layer._forward_hooks
            or layer._forward_pre_hooks
            or layer._backward_hooks
            or layer._backward_pre_hooks
        )
        if (hooks or HOOKS_OF_ALL or PRE_HOOKS_OF_ALL) and has_hooks(layer):
            return None
        own = layer.__dict__
        # `fuse_lora` puts its forward on LoRA layers only
        if FUSED in own and own.get("forward") is own[FUSED]:
            call = projection(layer, x, graph=graph)
            adapted = True
            if call is None:
                return None
        elif is_lora(layer) or bare_reason(layer) is not None:
            return None
        else:
            call = bare_projection(layer)
        calls.append(call)
    if not adapted:
        return None
    *inner, down = calls
    decide = decided if graph else dtypes_of
    dtypes = shared_dtypes(x, inner, decide)
    if dtypes is None or dtypes.out != dtypes.compute or decide(down, x, dtypes.out) != dtypes:
        return None
    return lora_mlp(x, inner, down, kind, dtypes, now=not graph)
