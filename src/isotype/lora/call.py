"""The values that one call of a plain layer uses, read at that call: tensors, scale, dropout, dtypes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.autocast import autocast_dtype
from .dropout import dropped_scale
from .dtypes import LoraDtypes, decide
from .group import Projection
from .plain import plain_now, plain_parts, why_not_fused

_BRANCH = "_isotype_branch_fp32"


class Call(NamedTuple):
    """a and b are None for a layer without an adapter; compute_dtype is a 4-bit layer's own."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    quant_state: Any
    compute_dtype: torch.dtype | None
    scale: float
    dropout: float
    branch_fp32: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:4]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What its dtypes depend on, apart from x and autocast."""
        a, b = self.a, self.b
        return (
            self.weight.dtype if self.quant_state is None else self.compute_dtype, self.quant_state is None, a is None or a.dtype,
            b is None or b.dtype, self.branch_fp32,
        )  # fmt: skip

    @property
    def features(self) -> int:
        """In features, of the layer as autograd sees it."""
        if self.a is not None:
            return self.a.shape[1]
        return (self.weight if self.quant_state is None else self.quant_state).shape[1]

    def decide(self, x: Tensor, x_dtype: torch.dtype | None = None) -> LoraDtypes:
        """The dtypes for an input like x, or for one of `x_dtype` on its device."""
        x_dtype = x_dtype or x.dtype
        if torch.compiler.is_compiling():
            return self._decide(x, x_dtype)
        key = (x_dtype, autocast_dtype(x), self.kind)
        if key not in _decided:
            _decided[key] = self._decide(x, x_dtype)
        return _decided[key]

    def _decide(self, x: Tensor, x_dtype: torch.dtype) -> LoraDtypes:
        quantised = self.quant_state is not None
        weight_dtype = (self.compute_dtype or x_dtype) if quantised else self.weight.dtype
        adapter = None if self.a is None or self.b is None else self.a.dtype
        if self.b is not None and adapter is not None and self.b.dtype != adapter:
            adapter = torch.promote_types(adapter, self.b.dtype)
        return decide(x, weight_dtype, adapter, quantised=quantised, branch_fp32=self.branch_fp32, x_dtype=x_dtype)

    def projection(self, keep: Tensor | None) -> Projection:
        scale = self.scale if self.dropout == 0.0 else dropped_scale(self.scale, self.dropout)
        return Projection(self.weight, self.bias, self.a, self.b, self.quant_state, scale, keep)


# Decisions that were taken: a model asks for the same few, several times a layer
_decided: dict[tuple[Any, ...], LoraDtypes] = {}


def call_now(layer: Any, x: Tensor) -> Call | None:
    """Of a LoRA layer whose input is x; None where PEFT's own code runs now."""
    if torch.compiler.is_compiling():
        return call_of(layer, x) if why_not_fused(layer) is None else None
    known = plain_now(layer)
    if known is None:
        return None
    if type(known.base) is not nn.Linear:
        return call_of(layer, x)
    # past nn.Module's own lookups, which take 1 us each
    tensors: dict[str, Any] = known.base._parameters
    dropout = known.dropout
    drops = type(dropout) is nn.Dropout and dropout.training
    return Call(
        tensors["weight"], tensors["bias"], known.a._parameters["weight"], known.b._parameters["weight"], None, None,
        float(layer.scaling[known.adapter]), dropout.p if drops else 0.0, _BRANCH in layer.__dict__,
    )  # fmt: skip


def call_of(layer: Any, x: Tensor) -> Call:
    """Of a LoRA layer that `why_not_fused` has just found plain; x is its input."""
    adapter, a, b, dropout, base = plain_parts(layer)
    quantised = type(base) is not nn.Linear
    if quantised and not base.compute_type_is_set:
        # bitsandbytes' layer adopts the first input's dtype permanently if it was given none
        base.set_compute_type(x)
        base.compute_type_is_set = True
    return Call(
        base.weight,
        base.bias,
        a.weight,
        b.weight,
        base.weight.quant_state if quantised else None,
        base.compute_dtype if quantised else None,
        float(layer.scaling[adapter]),
        dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0,
        _BRANCH in vars(layer),
    )


def bare_call_of(base: Any) -> Call:
    """Of a linear layer without an adapter."""
    quantised = type(base) is not nn.Linear
    state, compute = (base.weight.quant_state, base.compute_dtype) if quantised else (None, None)
    return Call(base.weight, base.bias, None, None, state, compute, 1.0, 0.0, False)


def wants_fp32_branch(layer: nn.Module, wanted: bool) -> None:
    """Marks the layer: its adapter branch is to be computed in fp32."""
    vars(layer).pop(_BRANCH, None)
    if wanted:
        vars(layer)[_BRANCH] = True
