"""Chooses the back end of an attention from its device, dtypes, sizes and options, and calls the
GPU back ends. It does not look at the values of the tensors.

`cpp`    the C++ kernels of this op, for bf16 on a CPU
`cudnn`  cuDNN's kernel, for plain causal attention on Hopper and Blackwell; it builds a plan for
         each new length (about 170 ms)
`flash`  PyTorch's FlashAttention, also for packed documents and sliding windows; for head sizes up
         to 256
`flex`   PyTorch's compiled flex_attention, for softcaps on a GPU
`sdpa`   PyTorch's scaled_dot_product_attention, which chooses one of PyTorch's kernels; for other
         dtypes, masks, older GPUs, and a CPU without the C++ kernels
`plain`  the reference, which holds all scores in memory; for softcaps if flex_attention cannot be
         compiled

cuDNN and FlashAttention are called as operators, so PyTorch does not check whether they support the
call. This module checks the same conditions as PyTorch. These conditions are in the functions
`can_use_cudnn_attention`, `can_use_flash_attention` and `check_prefer_cudnn_attention` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.13.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...environment.planned_device import is_planned, target_device_type
from ..backend import kernel_unavailable_reason


class Documents(NamedTuple):
    """The positions of the documents in a packed batch. Token indices count the tokens of all rows
    of the batch, one row after the other.

    bounds      int32[E+1]  the index of the first token of each of E documents, and then the number
                            of tokens
    longest     the number of tokens of the longest document
    whole_rows  whether each row is one document, as in a batch that is not packed
    """

    bounds: Tensor
    longest: int
    whole_rows: bool = False

    @classmethod
    def from_rows(cls, batch: int, positions: int, device: torch.device) -> Documents:
        """Creates documents for a batch in which every row is one document."""
        bounds = torch.arange(
            0, (batch + 1) * positions, max(positions, 1), dtype=torch.int32, device=device
        )
        return cls(bounds, positions, True)

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Documents:
        """Creates documents of these lengths, in order, on the CPU. Lengths of 0 are skipped."""
        lengths = [length for length in lengths if length]
        return cls(
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            max(lengths, default=0),
        )

    def to(self, device: torch.device) -> Documents:
        return self._replace(bounds=self.bounds.to(device, non_blocking=True))

    def document_ids(self, batch: int, positions: int) -> Tensor:
        """Returns the index of each token's document, as int64[B S]."""
        ends = self.bounds[1:].to(torch.int64)
        return torch.bucketize(
            torch.arange(batch * positions, device=ends.device), ends, right=True
        ).view(batch, positions)

    def mask(self, batch: int, positions: int) -> Tensor:
        """Returns bool[B 1 S S], true where query and key belong to the same document. This mask
        is for back ends that cannot read `bounds`.
        """
        ids_BS = self.document_ids(batch, positions)
        return ids_BS[:, None, :, None] == ids_BS[:, None, None, :]


# --- which back end

# the code that computes attention
Backend = Literal["cpp", "cudnn", "flash", "flex", "sdpa", "plain"]

_HALF = (torch.bfloat16, torch.float16)  # dtypes of 16 bits
# the compute capability (Hopper) that is assumed when memory is planned without a GPU
PLANNED_CAPABILITY = (9, 0)
# the oldest and the newest compute capability that FlashAttention supports
FLASH_OLDEST = (8, 0)
FLASH_NEWEST = (12, 1)
# PyTorch prefers cuDNN above this version: 9.15.1 fixes lengths that are not a multiple of 128
# (pytorch issue 169849)
CUDNN_AFTER = 91500


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of a CUDA device. Returns None for other devices and for AMD's
    GPUs, whose version numbers mean something else.
    """
    if is_planned(device) and target_device_type(device) == "cuda":
        if not torch.cuda.is_available():
            return PLANNED_CAPABILITY
        return _capability(torch.cuda.current_device())
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _capability(device.index)


@cache
def cudnn_version() -> int:
    """Returns the version of cuDNN as a number (91501 for 9.15.1), or 0 if PyTorch was built
    without cuDNN. Without a GPU, the version is only needed to plan memory, and a version that
    supports attention is returned.
    """
    if not torch.cuda.is_available():
        return CUDNN_AFTER + 1
    return torch.backends.cudnn.version() or 0


@cache
def has_flash() -> bool:
    """Whether this PyTorch was built with FlashAttention. Returns True without a GPU, because the
    result is then only used to plan memory.
    """
    return not torch.cuda.is_available() or torch.backends.cuda.is_flash_attention_available()


@contextmanager
def disable_cudnn_with_mask(mask: Tensor | None) -> Iterator[None]:
    """Within this block, PyTorch's attention does not use cuDNN if there is a mask. With a mask,
    cuDNN's backward returns NaN for some lengths (a multiple of 128 plus 64, pytorch issue 196678).
    If the queries are bf16 and the mask is fp32, cuDNN also reads the mask as bf16 (pytorch pull
    request 191612). Use this block only outside compiled graphs.
    """
    if (
        mask is None
        or target_device_type(mask.device) != "cuda"
        or not torch.backends.cuda.cudnn_sdp_enabled()
    ):
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _cudnn_supports(compute_capability: tuple[int, int], depth: int) -> bool:
    if (
        compute_capability[0] not in (9, 10)
        or compute_capability[1] not in (0, 3)
        or depth > 128
        or cudnn_version() <= CUDNN_AFTER
    ):
        return False
    if (
        not torch.backends.cuda.cudnn_sdp_enabled()
        or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    ):
        return False
    # in cuDNN's backward the order of additions differs from call to call, while FlashAttention has
    # a deterministic backward
    return (
        not torch.are_deterministic_algorithms_enabled()
        or torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _flash_supports(compute_capability: tuple[int, int], depth: int) -> bool:
    if (
        not FLASH_OLDEST <= compute_capability <= FLASH_NEWEST
        or depth > 256
        or not has_flash()
        or not torch.backends.cuda.flash_sdp_enabled()
    ):
        return False
    # heads of 200 to 224 have no backward on GPUs with less shared memory per multiprocessor than
    # an A100
    return not (
        192 < depth <= 224
        and ((8, 6) <= compute_capability <= (8, 9) or compute_capability >= (12, 0))
    )


def choose_gpu_backend(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    has_mask: bool,
    window: int | None,
    softcap: float | None,
    is_packed: bool,
    device: torch.device | None = None,
) -> Backend:
    """Returns the back end for tensors of these shapes on a GPU. It is `flex` for softcaps, and
    `sdpa` for calls that no fast kernel supports.

    device  the device for which the back end is chosen, if it is not the tensors' device
    """
    device = device or query.device
    compute_capability = capability(device)
    if softcap is not None:
        # flex_attention is a Triton kernel
        can_compile = (
            compute_capability is not None
            and compute_capability >= FLASH_OLDEST
            and (is_planned(device) or not kernel_unavailable_reason(device))
        )
        return "flex" if can_compile else "plain"
    depth = query.shape[3]
    is_square = query.shape[2] == key.shape[2]
    if compute_capability is None or dtype not in _HALF or depth % 8 or not is_square or has_mask:
        return "sdpa"
    if causal and not is_packed and window is None and _cudnn_supports(compute_capability, depth):
        return "cudnn"
    return "flash" if _flash_supports(compute_capability, depth) else "sdpa"


# --- PyTorch's kernels for CUDA, called as operators, so that the op can save the output and its
# logsumexp. B batch, N query heads, M key heads, S queries and keys, D head
# size, T tokens of all rows

aten = torch.ops.aten


def _to_flash_layout(x_BNSD: Tensor, documents: Documents | None) -> Tensor:
    """Returns x in FlashAttention's layout: [B S N D], or [T N D] with documents."""
    x_BSND = x_BNSD.transpose(1, 2)
    if documents is None:
        return x_BSND
    return x_BSND.reshape(-1, *x_BSND.shape[2:])


def _from_flash_layout(y: Tensor, like_BNSD: Tensor) -> Tensor:
    batch, heads, queries, depth = like_BNSD.shape
    return y.view(batch, queries, heads, depth).transpose(1, 2)


def _sequence_bounds(query: Tensor, documents: Documents | None) -> tuple[Any, ...]:
    """Returns the arguments that tell FlashAttention where each document starts. There are four
    arguments: the start positions of the documents in the queries, the start positions in the keys,
    and the length of the longest document in the queries and in the keys.
    """
    if documents is None:
        return None, None, query.shape[2], query.shape[2]
    return documents.bounds, documents.bounds, documents.longest, documents.longest


def _flash_options(window: int | None, causal: bool, scale: float) -> dict[str, Any]:
    if window is None:
        return {"scale": scale}
    # the number of keys before and after a query, or -1 for all
    return {
        "scale": scale,
        "window_size_left": window - 1,
        "window_size_right": 0 if causal else -1,
    }


def flash_forward(
    q_BNSD: Tensor,
    k_BMSD: Tensor,
    v_BMSD: Tensor,
    documents: Documents | None,
    window: int | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Returns (out, logsumexp, random state, unused part of the random state). `flash_backward`
    needs all of them.
    """
    inputs = (_to_flash_layout(x, documents) for x in (q_BNSD, k_BMSD, v_BMSD))
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *inputs,
        *_sequence_bounds(q_BNSD, documents),
        0.0,
        causal,
        False,
        **_flash_options(window, causal, scale),
    )
    return _from_flash_layout(out, q_BNSD), lse, state, unused


def flash_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: tuple[Tensor, ...],
    documents: Documents | None,
    window: int | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lse, *state = saved
    inputs = (_to_flash_layout(x, documents) for x in (q, k, v, out))
    grads = aten._flash_attention_backward(
        _to_flash_layout(dy, documents).contiguous(),
        *inputs,
        lse,
        *_sequence_bounds(q, documents),
        0.0,
        causal,
        *state,
        **_flash_options(window, causal, scale),
    )
    dq, dk, dv = (_from_flash_layout(g, x) for g, x in zip(grads, (q, k, v)))
    return dq, dk, dv


def cudnn_forward(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Returns (out, logsumexp, seed, offset)."""
    results = aten._scaled_dot_product_cudnn_attention(
        q_BNSD, k_BMSD, v_BMSD, None, True, 0.0, causal, False, scale=scale
    )
    return results[0], results[1], results[6], results[7]


def cudnn_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: tuple[Tensor, ...],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = saved
    # bias and bounds are None; PyTorch's backward passes undefined tensors here
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        dy,
        q,
        k,
        v,
        out,
        lse,
        seed,
        offset,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return gradients


# --- softcaps: PyTorch's flex_attention, compiled once for each kind of call and for any length

# The number of kinds of calls that may be compiled. Kinds differ in window, dtype, device, packing
# and gradients, and each may be compiled for one length and for any length. Dynamo's default limit
# of 8 is too small; above the limit flex_attention runs uncompiled, with all scores in memory.
RECOMPILE_LIMIT = 64
# all layers of a batch, and their recomputes, need the same one or two block masks
BLOCK_MASK_CACHE_SIZE = 8
_block_masks: OrderedDict[tuple[object, ...], tuple[Any, Tensor | None]] = OrderedDict()


def compile_any_length(
    function: Callable[..., Any], backend: Any = "inductor"
) -> Callable[..., Any]:
    """Compiles `function` for the first length. When a call has another length, `function` is
    compiled a second time, now for any length. Compiling it for each length would exceed PyTorch's
    limit of compilations.
    """
    compiled = torch.compile(function, backend=backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(*args, **kwargs)

    return run


@cache
def _flex_functions(on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns (flex_attention, create_block_mask). They are compiled if they run on a GPU. An
    uncompiled create_block_mask allocates a mask of positions x positions.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention: Callable[..., Any] = flex_attention
    create_mask: Callable[..., Any] = create_block_mask
    if on_gpu:
        return (compile_any_length(attention), compile_any_length(create_mask))
    return (attention, create_mask)


def flex_attention_softcapped(
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
    """Computes `attention` with a softcap. For each block of queries, it skips the blocks of keys
    to which none of these queries attends. mask is bool[B or 1, 1 or N, S, T].
    """

    def cap_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    build = partial(_build_block_mask, query, key.shape[2], mask, causal, window, documents)
    if mask is not None:
        block_mask = build()
    else:
        block_mask = _cached_block_mask(build, query, key.shape[2], causal, window, documents)
    out: Tensor = _flex_functions(query.is_cuda)[0](
        query,
        key,
        value,
        score_mod=cap_score,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out


def _cached_block_mask(
    build: Callable[[], Any],
    query: Tensor,
    keys: int,
    causal: bool,
    window: int | None,
    documents: Documents | None,
) -> Any:
    """Returns `build()`. If `build` was already called for another layer of this batch, returns the
    block mask of that layer.
    """
    bounds = None if documents is None else documents.bounds
    batch = None if documents is None else query.shape[0]
    # a mask that was built in inference mode cannot be saved for backward
    cache_key = (
        query.device,
        query.shape[2],
        keys,
        causal,
        window,
        batch,
        id(bounds),
        torch.is_inference_mode_enabled(),
    )
    if cache_key not in _block_masks:
        # the bounds are stored too, so that no later tensor gets the same id
        _block_masks[cache_key] = build(), bounds
        while len(_block_masks) > BLOCK_MASK_CACHE_SIZE:
            _block_masks.popitem(last=False)
    return _block_masks[cache_key][0]


def _build_block_mask(
    query: Tensor,
    keys: int,
    mask: Tensor | None,
    causal: bool,
    window: int | None,
    documents: Documents | None,
) -> Any:
    if documents is None:
        ids_BS = None
    else:
        ids_BS = documents.document_ids(query.shape[0], query.shape[2])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_allowed = q >= k if causal else q >= 0
        if window is not None:
            is_allowed = is_allowed & (q - k < window)
        if mask is not None:
            is_allowed = (
                is_allowed
                & mask[b if mask.shape[0] > 1 else 0, h if mask.shape[1] > 1 else 0, q, k]
            )
        if ids_BS is not None:
            is_allowed = is_allowed & (ids_BS[b, q] == ids_BS[b, k])
        return is_allowed

    if ids_BS is not None or (mask is not None and mask.shape[0] > 1):
        batch = query.shape[0]
    else:
        batch = None
    heads = query.shape[1] if mask is not None and mask.shape[1] > 1 else None
    return _flex_functions(query.is_cuda)[1](
        mask_mod, batch, heads, query.shape[2], keys, device=query.device
    )
