"""Attention on a CPU: transformers' "sdpa" function, which a forward finds in a table of its globals, becomes one that calls `attention`.

PyTorch's own takes three to four times as long in bf16 there. Whatever the op does not compute (dropout, other dtypes, a bias, few queries
as in generation, a compiled graph) goes to the original, call by call; so does every other implementation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import attention
from ..ops.attention.function import kernels_take
from ..ops.autocast import autocast_dtype
from .private import Replacement, why_not_rebuilt

TABLE = "ALL_ATTENTION_FUNCTIONS"
# below so many queries PyTorch's forward is as fast: most lanes of a block of 64 would be empty
FEW = 32
# arguments that change the result, where they are given
BEYOND = ("softcap", "position_bias", "cache", "s_aux", "output_attentions")


def is_candidate(module: nn.Module) -> bool:
    """Whether the module's forward looks its attention function up in transformers' table, and would find "sdpa" there."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or TABLE not in forward.__code__.co_names:
        return False
    table, config = forward.__globals__.get(TABLE), getattr(module, "config", None)
    return hasattr(table, "get_interface") and getattr(config, "_attn_implementation", None) == "sdpa"


def find(module: nn.Module) -> tuple[Replacement | None, str]:
    """What takes the place of the table, or None, and why."""
    forward: Any = type(module).forward
    reason = why_not_rebuilt(forward)
    return (None, reason) if reason else (Replacement(TABLE, Functions), "")


class Functions:
    """transformers' table of attention functions, with another one for "sdpa"."""

    def __init__(self, table: Any) -> None:
        self.table = table
        # one function for each original, so that Dynamo does not compile again for every call
        self.made: dict[Any, Callable[..., Any]] = {}

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        original: Callable[..., Any] = self.table.get_interface(implementation, default)
        # a user may have registered another function under that name
        transformers_own = getattr(original, "__module__", None) == "transformers.integrations.sdpa_attention"
        if implementation != "sdpa" or not transformers_own or torch.compiler.is_compiling():
            return original
        return self.made.setdefault(original, on_cpu(original))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)


def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' sdpa function (module, query, key, value, mask) -> ([B S N D], None), by `attention` where its kernels run."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        beyond = dropout or query.shape[2] < FEW or any(others.get(name) is not None and others[name] is not False for name in BEYOND)
        if beyond or not kernels_take(autocast_dtype(query) or query.dtype, query, key, value, attention_mask):
            theirs: tuple[Tensor, None] = original(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
            return theirs
        causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        return attention(query, key, value, mask=attention_mask, causal=causal, scale=scaling).transpose(1, 2).contiguous(), None

    return forward
