"""Softcapped attention on a GPU: PyTorch's flex_attention, compiled once for each kind of call, whatever the lengths."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .documents import Documents

# Kinds of calls: windows, packed or not, with gradients or without, dtypes, devices, each for one length and for any length. Dynamo's own
# limit of 8 is fewer; past it flex_attention runs uncompiled, with every score in memory.
KINDS = 64
# block masks that are kept: every layer of a batch, and its recompute, asks for the same one or two
KEPT = 8
_kept: OrderedDict[tuple[object, ...], tuple[Any, Tensor | None]] = OrderedDict()


def compiled(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """`function`, compiled for the first length and, with the second, for any length: lengths of one compile each would pass the limit."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        more: dict[str, Any] = {"recompile_limit": KINDS}
        made: Callable[..., Any] = torch.compile(function, backend=backend, **more)
        return made
    own = torch.compile(function, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        # an older torch reads the limit where it compiles
        with torch._dynamo.config.patch(recompile_limit=KINDS):
            return own(*args, **kwargs)

    return run


@cache
def _functions(on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(flex_attention, create_block_mask), compiled on a GPU. Uncompiled, the second makes a mask of positions x positions on its way."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend: Callable[..., Any] = flex_attention
    blocks: Callable[..., Any] = create_block_mask
    return (compiled(attend), compiled(blocks)) if on_gpu else (attend, blocks)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float,
    documents: Documents | None,
) -> Tensor:
    """As `attention`; blocks of keys that no query of a block attends to are skipped. mask bool[B or 1, 1 or N, S, T]."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    make = partial(_blocks, query, key.shape[2], mask, causal, window, documents)
    blocks = make() if mask is not None else _once(make, query, key.shape[2], causal, window, documents)
    out: Tensor = _functions(query.is_cuda)[0](
        query, key, value, score_mod=capped, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out


def _once(make: Callable[[], Any], query: Tensor, keys: int, causal: bool, window: int | None, documents: Documents | None) -> Any:
    """`make()`, or what it gave for another layer of this batch."""
    bounds = None if documents is None else documents.bounds
    rows = None if documents is None else query.shape[0]
    # a mask made in inference mode cannot be saved for backward
    of = (query.device, query.shape[2], keys, causal, window, rows, id(bounds), torch.is_inference_mode_enabled())
    if of not in _kept:
        # the bounds are held, so that no other tensor gets their id
        _kept[of] = make(), bounds
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return _kept[of][0]


def _blocks(query: Tensor, keys: int, mask: Tensor | None, causal: bool, window: int | None, documents: Documents | None) -> Any:
    numbers_BS = None if documents is None else documents.numbers(query.shape[0], query.shape[2])

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keep = q >= k if causal else q >= 0
        if window is not None:
            keep = keep & (q - k < window)
        if mask is not None:
            keep = keep & mask[b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0, q, k]
        if numbers_BS is not None:
            keep = keep & (numbers_BS[b, q] == numbers_BS[b, k])
        return keep

    batch = query.shape[0] if numbers_BS is not None or (mask is not None and mask.shape[0] > 1) else None
    heads = query.shape[1] if mask is not None and mask.shape[1] > 1 else None
    return _functions(query.is_cuda)[1](allowed, batch, heads, query.shape[2], keys, device=query.device)
