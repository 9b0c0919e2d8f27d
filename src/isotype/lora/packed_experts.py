"""The experts of a mixture over packed stacks, frozen: an expert's matrices are widened where its rows need them, and again in backward.

One expert is wide at a time: widening a whole stack would take 1 GiB a layer of gpt-oss-20b.

T tokens, C experts a token, S rows of one expert, E experts, K in features, O out features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.backend import autocast_off, refuse_second_derivative
from ..ops.packed import StackState


class ExpertLinear(torch.autograd.Function):
    """x Wᵀ of one expert's packed W; saves the packed stack only."""

    @staticmethod
    def forward(ctx: Any, x_SK: Tensor, packed: Tensor, state: StackState, expert: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.state, ctx.expert = state, expert
        with autocast_off(x_SK):
            return F.linear(x_SK, state.widen_expert(packed, expert, x_SK.dtype))

    @staticmethod
    def backward(ctx: Any, dy_SO: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("packed experts")
        (packed,) = ctx.saved_tensors
        with autocast_off(dy_SO):
            return dy_SO @ ctx.state.widen_expert(packed, ctx.expert, dy_SO.dtype), None, None, None


def packed_experts_forward(self: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """In place of the forward of transformers' stacked experts, with its result.

    hidden_states  F[T K]
    index          int[T C], the experts of each token
    weights        F[T C], their shares
    ->             F[T K]
    """
    x_TK = hidden_states.reshape(-1, hidden_states.shape[-1])
    index, weights = index.reshape(x_TK.shape[0], -1), weights.reshape(x_TK.shape[0], -1)
    total = torch.zeros_like(x_TK)
    for expert in index.unique().tolist():
        if expert >= self.num_experts:
            continue
        token, place = torch.where(index == expert)
        h = self._apply_gate(_layer(self, "gate_up_proj", x_TK[token], expert))
        y = _layer(self, "down_proj", h.to(x_TK.dtype), expert) * weights[token, place, None]
        total = total.index_add(0, token, y.to(total.dtype))
    return total.view(hidden_states.shape)


def _layer(module: Any, name: str, x: Tensor, expert: int) -> Tensor:
    packed = getattr(module, name)
    # a module that is moved takes the packed bytes along, not what belongs to them
    state = packed.quant_state = packed.quant_state.moved(packed.device)
    y: Tensor = ExpertLinear.apply(x, packed, state, expert)
    bias = module._parameters.get(f"{name}_bias")
    return y if bias is None else y + bias[expert].to(y.dtype)
