"""Defines the public op `attention` and its autograd function. B is the batch size, N the number of
query heads, M the number of key heads, S the number of queries, T the number of keys, and D the
head size.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dtypes import format_dtype
from ...environment.planned_device import is_planned, target_device_type
from ...errors import DtypeError, ShapeError, UsageError
from ..backend import (
    Implementation,
    apply_function,
    arithmetic_dtype,
    autocast_dtype,
    autocast_off,
    choose_implementation,
    refuse_second_derivative,
    uses_cpp,
)
from ..contract import OpContract
from ..cpp import CppKernels
from ..library import library_op
from ..recomputable import recompute, saved_or_recomputed_each
from ..recomputed_layer import compute_or_restore_attention, running_checkpointed_layers
from . import gpu
from .gpu import Backend, Documents, choose_gpu_backend, disable_cudnn_with_mask
from .widened import widened_attention

ATTENTION = OpContract(
    "query: F[B N S D], key: F[B M T D], value: F[B M T D] -> F[B N S D]",
    inside="fp32",
    grads={"query": "F", "key": "F", "value": "F"},
    autocast="follows",
)


def mask_outside_window(allowed_ST: Tensor, window: int) -> Tensor:
    """Returns a copy of `allowed` that is False for each key that is `window` or more positions
    before its query. For keys after the query, `allowed` does not change.
    """
    return allowed_ST.triu(1 - window)


def _allowed_pairs(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Returns bool[S T], true where a query attends to a key."""
    allowed_ST = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed_ST = allowed_ST.tril()
    if window is not None:
        allowed_ST = mask_outside_window(allowed_ST, window)
    return allowed_ST


def attention_reference(
    query_BNSD: Tensor,
    key_BMTD: Tensor,
    value_BMTD: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Computes `attention` in plain PyTorch. It also supports fp64 inputs."""
    with autocast_off(query_BNSD):
        dtype = arithmetic_dtype(query_BNSD.dtype)
        heads_per_key = query_BNSD.shape[1] // key_BMTD.shape[1]
        key_BNTD, value_BNTD = (
            t.to(dtype).repeat_interleave(heads_per_key, 1) for t in (key_BMTD, value_BMTD)
        )
        if scale is None:
            scale = query_BNSD.shape[-1] ** -0.5
        score_BNST = query_BNSD.to(dtype) @ key_BNTD.transpose(-1, -2) * scale
        if softcap is not None:
            score_BNST = softcap * torch.tanh(score_BNST / softcap)
        queries, keys = score_BNST.shape[-2:]
        allowed = _allowed_pairs(queries, keys, causal, window, query_BNSD.device)
        if mask is not None:
            allowed = allowed & mask
        probability_BNST = score_BNST.masked_fill(~allowed, -torch.inf).softmax(-1)
        # a query that attends to no key gets zeros
        probability_BNST = probability_BNST.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        return (probability_BNST @ value_BNTD).to(query_BNSD.dtype)


# --- the C++ kernels of cpu.cpp: bf16, rows of any stride

KERNELS = CppKernels(__file__, in_graphs=True, forward="appppppppf", backward="apppppppppppif")
# queries and keys of a block in cpu.cpp
BLOCK = 64
# If a batch has at least this many key heads, the key heads are divided among threads; otherwise
# the query heads are. This number is a constant and not the number of threads, so that the order of
# a sum does not depend on the machine
_KEY_HEADS = 16


def _make_rows_contiguous(*tensors: Tensor) -> list[Tensor]:
    contiguous: list[Tensor] = []
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        contiguous.append(tensor)
    return contiguous


def _mask_bytes(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """Returns the mask as bytes [B T S'], where S' is S rounded up to whole blocks. For each key,
    the values of all queries are adjacent in memory. The kernels store the scores in this order
    too.
    """
    mask_BST = mask[:, 0].expand(mask.shape[0], queries, keys)
    bytes_BTS = mask_BST.transpose(1, 2).view(torch.uint8)
    return F.pad(bytes_BTS, (0, -queries % BLOCK)).contiguous()


def _first_keys(query_BNSD: Tensor, documents: Documents | None, window: int | None) -> Tensor:
    """Returns the index of the first key that each query attends to, as int32[B S'], where S' is S
    rounded up to whole blocks.
    """
    batch, _, queries, _ = query_BNSD.shape
    positions_S = torch.arange(queries, device=query_BNSD.device)
    if documents is None:
        first_BS = torch.zeros(batch, queries, dtype=torch.int64, device=query_BNSD.device)
    else:
        # a row may begin inside a document; documents do not attend to keys of another row
        starts_BS = documents.bounds[documents.document_ids(batch, queries)]
        row_starts_B1 = torch.arange(batch, device=query_BNSD.device)[:, None] * queries
        first_BS = (starts_BS - row_starts_B1).clamp_min(0)
    if window is not None:
        first_BS = torch.maximum(first_BS, positions_S - (window - 1))
    return F.pad(first_BS, (0, -queries % BLOCK)).to(torch.int32)


def _pack_shape(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dy: Tensor, mask: Tensor | None, causal: bool
) -> Any:
    """Returns the fields of `struct Shape` in cpu.cpp."""
    batch, heads, queries, depth = q.shape
    mask_strides = (0, 0)
    if mask is not None:
        row_stride = mask.stride(0)
        if mask.shape[0] == 1:
            # all rows of the batch share one mask
            row_stride = 0
        mask_strides = (row_stride, mask.stride(1))
    sizes = (batch, heads, k.shape[1], queries, k.shape[2], depth, int(causal), *mask_strides)
    strides = (
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *dy.stride()[:3],
    )
    return (ctypes.c_int64 * (len(sizes) + len(strides)))(*sizes, *strides)


def _fake_forward(
    q_BNSD: Tensor,
    k_BMTD: Tensor,
    v_BMTD: Tensor,
    mask: Tensor | None,
    first_keys: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, queries, depth = q_BNSD.shape
    # positions come before heads in memory, which is the layout that the output projection reads
    out_BSND = torch.empty((batch, queries, heads, depth), dtype=q_BNSD.dtype, device=q_BNSD.device)
    lse_BNS = torch.empty((batch, heads, queries), dtype=torch.float32, device=q_BNSD.device)
    return out_BSND.transpose(1, 2), lse_BNS


@library_op(
    "attention_forward_cpp(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? first_keys,"
    " bool causal, float scale) -> (Tensor, Tensor)",
    fake=_fake_forward,
)
def attention_forward(
    q_BNSD: Tensor,
    k_BMTD: Tensor,
    v_BMTD: Tensor,
    mask: Tensor | None,
    first_keys: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns (out, the logsumexp of each query's scores). The logsumexp of a query without keys is
    inf.

    first_keys  int32[B S'] or None  the result of `_first_keys`; it needs `causal`
    """
    out_BNSD, lse_BNS = _fake_forward(q_BNSD, k_BMTD, v_BMTD, mask, first_keys, causal, scale)
    q, k, v = _make_rows_contiguous(q_BNSD, k_BMTD, v_BMTD)
    batch, key_heads, keys, depth = k.shape
    mask_bytes = None
    if mask is not None:
        mask_bytes = _mask_bytes(mask, batch, q.shape[2], keys)
    v_transposed = torch.empty((batch, key_heads, depth, keys + -keys % BLOCK), dtype=v.dtype)
    KERNELS(
        "forward",
        _pack_shape(q, k, v, out_BNSD, out_BNSD, mask_bytes, causal),
        q,
        k,
        v,
        mask_bytes,
        first_keys,
        out_BNSD,
        lse_BNS,
        v_transposed,
        scale,
    )
    return out_BNSD, lse_BNS


def _fake_backward(
    q_BNSD: Tensor,
    k_BMTD: Tensor,
    v_BMTD: Tensor,
    mask: Tensor | None,
    first_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dy: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads: list[Tensor] = []
    for t in (q_BNSD, k_BMTD, v_BMTD):
        grads.append(torch.empty(t.shape, dtype=t.dtype, device=t.device))
    return grads[0], grads[1], grads[2]


@library_op(
    "attention_backward_cpp(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? first_keys,"
    " Tensor out, Tensor lse, Tensor dy, bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
)
def attention_backward(
    q_BNSD: Tensor,
    k_BMTD: Tensor,
    v_BMTD: Tensor,
    mask: Tensor | None,
    first_keys: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dy: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dy = _make_rows_contiguous(q_BNSD, k_BMTD, v_BMTD, dy)
    dq, dk, dv = _fake_backward(q, k, v, mask, first_keys, out, lse, dy, causal, scale)
    batch, heads, queries, _ = q.shape
    mask_bytes = None
    if mask is not None:
        mask_bytes = _mask_bytes(mask, batch, queries, k.shape[2])
    query_head_parts = 1
    if batch * k.shape[1] < _KEY_HEADS:
        query_head_parts = heads // k.shape[1]
    # each query head writes a separate part of the gradient of the key head that it reads. The
    # parts are summed here in fp32 and narrowed once
    if query_head_parts > 1:
        partial_grads = torch.empty(
            (2, *k.shape[:2], query_head_parts, *k.shape[2:]), dtype=torch.float32
        ).unbind()
    else:
        partial_grads = (dk, dv)
    KERNELS(
        "backward",
        _pack_shape(q, k, v, out, dy, mask_bytes, causal),
        q,
        k,
        v,
        mask_bytes,
        first_keys,
        out,
        lse,
        dy,
        dq,
        *partial_grads,
        query_head_parts,
        scale,
    )
    if query_head_parts > 1:
        dk = partial_grads[0].sum(2).to(k.dtype)
        dv = partial_grads[1].sum(2).to(k.dtype)
    return dq, dk, dv


# --- the op


class Attention(torch.autograd.Function):
    """The autograd function of the back ends cpp, flash and cudnn. It saves query, key and value
    (or the tensors from which they are recomputed, see `ops.recomputable`), the output, and one
    fp32 logsumexp per query. It saves no [queries x keys] matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BNSD: Tensor,
        k_BMTD: Tensor,
        v_BMTD: Tensor,
        mask: Tensor | None,
        first_keys: Tensor | None,
        causal: bool,
        scale: float,
        backend: Backend,
        documents: Documents | None,
        window: int | None,
        implementation: Implementation,
    ) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            if backend == "flash":
                return gpu.flash_forward(q_BNSD, k_BMTD, v_BMTD, documents, window, causal, scale)
            if backend == "cudnn":
                return gpu.cudnn_forward(q_BNSD, k_BMTD, v_BMTD, causal, scale)
            return attention_forward(q_BNSD, k_BMTD, v_BMTD, mask, first_keys, causal, scale)

        if implementation == "graph" or not running_checkpointed_layers:
            out_BNSD, *statistics = compute()
        else:
            out_BNSD, *statistics = compute_or_restore_attention(compute)
        recipes, inputs = saved_or_recomputed_each(q_BNSD, k_BMTD, v_BMTD)
        ctx.save_for_backward(mask, first_keys, out_BNSD, *inputs, *statistics)
        ctx.recipes = recipes
        ctx.causal = causal
        ctx.scale = scale
        ctx.backend = backend
        ctx.documents = documents
        ctx.window = window
        return out_BNSD

    @staticmethod
    def backward(ctx: Any, dy_BNSD: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention")
        mask, first_keys, out_BNSD, *saved = ctx.saved_tensors
        inputs: list[Tensor] = []
        for recompute_input, count in ctx.recipes:
            tensors = saved[:count]
            saved = saved[count:]
            if recompute_input is None:
                inputs.append(tensors[0])
            else:
                inputs.append(recompute(recompute_input, tensors))
        q_BNSD, k_BMTD, v_BMTD = inputs
        no_grads = (None,) * 8
        arguments = (dy_BNSD, q_BNSD, k_BMTD, v_BMTD, out_BNSD, tuple(saved))
        if ctx.backend == "flash":
            return (
                *gpu.flash_backward(*arguments, ctx.documents, ctx.window, ctx.causal, ctx.scale),
                *no_grads,
            )
        if ctx.backend == "cudnn":
            return *gpu.cudnn_backward(*arguments, ctx.causal, ctx.scale), *no_grads
        grads = attention_backward(
            q_BNSD,
            k_BMTD,
            v_BMTD,
            mask,
            first_keys,
            out_BNSD,
            saved[0],
            dy_BNSD,
            ctx.causal,
            ctx.scale,
        )
        return *grads, *no_grads


def choose_backend(
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    is_packed: bool = False,
) -> Backend:
    """Returns the back end that computes the attention of these tensors in `dtype`. The module
    `gpu` lists the back ends.
    """
    if key.shape != value.shape and softcap is None:
        return "sdpa"
    if key.shape != value.shape:
        return "plain"
    if target_device_type(query.device) == "cuda" and not torch.compiler.is_compiling():
        return choose_gpu_backend(
            dtype,
            query,
            key,
            causal=causal,
            has_mask=mask is not None,
            window=window,
            softcap=softcap,
            is_packed=is_packed,
        )
    if softcap is not None:
        return "plain"
    is_limited = is_packed or window is not None
    if (causal or not is_limited) and uses_cpp_kernels(dtype, query, key, value, mask):
        return "cpp"
    return "sdpa"


def uses_cpp_kernels(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> bool:
    """Whether the C++ kernels run on these tensors in `dtype`. The kernels need bf16 tensors on a
    CPU, a head size that is a multiple of 16, and a bool mask that is the same for all heads.
    """
    return _cpp_supports(dtype, query, key, value, mask) and uses_cpp(KERNELS, query, key, value)


def _cpp_supports(
    dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> bool:
    """Whether the C++ kernels support attention with these shapes and dtypes."""
    batch, _, queries, depth = query.shape
    keys = key.shape[2]
    if dtype != torch.bfloat16 or key.shape != value.shape:
        return False
    if depth % 16 or min(batch, queries, keys, depth) == 0:
        return False
    if mask is None:
        return True
    return mask.dtype == torch.bool and mask.shape in (
        (batch, 1, queries, keys),
        (1, 1, queries, keys),
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Computes scaled dot-product attention. If a kernel supports the call (`choose_backend`), no
    [queries x keys] matrix is stored.

    query       F[B N S D]   cast to autocast's dtype if autocast is on
    key, value  F[B M T D]   N is a multiple of M: neighbouring query heads share a key head
    mask        bool[B or 1, 1 or N, S, T], true where a query attends to a key
    causal      query i attends to keys 0 to i only
    scale       factor of the scores; 1 / sqrt(D) by default
    window      a query attends to itself and the window - 1 keys before it; `causal` decides
                whether it also attends to later keys
    softcap     scores become softcap * tanh(score / softcap)
    documents   documents of packed rows: a query attends only to keys of the same document; S = T
    ->          F[B N S D]; zeros for a query that attends to no key
    inside      scores, their softmax and all sums in fp32; probabilities are cast to F before they
                are multiplied by value
    grads       query: F   key: F   value: F   (gradients of shared heads are summed in fp32)
    In bf16 on a CPU this runs C++ kernels. The C++ kernels use the recurrences of FlashAttention-2
    (Dao 2023) and process several queries in one vector register. On a GPU it runs cuDNN's or
    FlashAttention's kernels. In all other cases it calls PyTorch's scaled_dot_product_attention, in
    fp32 on a CPU without bf16 instructions.
    Raises  DtypeError DT001 when the dtypes differ without autocast; ShapeError SH001; UsageError
            if `window` or `softcap` is too small
    """
    _check_inputs(query, key, value)
    if window is not None and window < 1:
        raise UsageError(f"window is {window}: expected 1 key or more")
    if softcap is not None and softcap <= 0:
        raise UsageError(f"softcap is {softcap}: expected a positive number")
    cast_dtype = autocast_dtype(query)
    if cast_dtype is not None and query.dtype != torch.float64:
        query = query.to(cast_dtype)
        key = key.to(cast_dtype)
        value = value.to(cast_dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"query, key and value are {format_dtype(query.dtype)}, {format_dtype(key.dtype)} and"
            f" {format_dtype(value.dtype)}: expected one",
            code="DT001",
        )
    given_scale = scale
    if scale is None:
        scale = query.shape[-1] ** -0.5
    implementation = choose_implementation(KERNELS, query, key, value)
    is_limited = documents is not None or window is not None
    backend: Backend
    if (
        implementation == "cpp"
        and query.is_cpu
        and softcap is None
        and (causal or not is_limited)
        and _cpp_supports(query.dtype, query, key, value, mask)
    ):
        backend = "cpp"
    else:
        backend = choose_backend(
            query.dtype,
            query,
            key,
            value,
            mask,
            causal=causal,
            window=window,
            softcap=softcap,
            is_packed=documents is not None,
        )
    if backend == "flex" and is_planned(query.device):
        # planning memory runs no compiler. FlashAttention has the same operands and results as
        # flex_attention's kernel
        backend = "flash"
    first_keys = None
    if backend == "cpp" and is_limited:
        first_keys = _first_keys(query, documents, window)
    if backend in ("cpp", "flash", "cudnn"):
        out: Tensor = apply_function(
            Attention,
            query,
            key,
            value,
            mask,
            first_keys,
            causal,
            scale,
            backend,
            documents,
            window,
            implementation,
        )
        return out
    if backend == "flex":
        assert softcap is not None
        return gpu.flex_attention_softcapped(
            query, key, value, mask, causal, scale, window, softcap, documents
        )
    mask = _add_document_mask(mask, documents, query)
    if backend == "plain":
        return attention_reference(
            query, key, value, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap
        )
    return _torch_attention(query, key, value, mask, causal, given_scale, window)


def _torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Calls PyTorch's scaled_dot_product_attention. That function accepts a mask or `is_causal` but
    not both, and has no sliding window.
    """
    if (mask is not None and causal) or window is not None:
        allowed = _allowed_pairs(query.shape[2], key.shape[2], causal, window, query.device)
        if mask is None:
            mask = allowed
        else:
            mask = mask & allowed
        causal = False
    if not torch.compiler.is_dynamo_compiling():
        output = widened_attention(query, key, value, mask, causal=causal, scale=scale)
        if output is not None:
            return output
    if torch.compiler.is_compiling():
        context: AbstractContextManager[None] = nullcontext()
    else:
        context = disable_cudnn_with_mask(mask)
    with context:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def reads_documents(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, softcap: float | None
) -> bool:
    """Whether `attention` computes packed documents with a kernel that reads their bounds. It
    otherwise creates a mask from them in each call.
    """
    dtype = autocast_dtype(query) or query.dtype
    backend = choose_backend(
        dtype, query, key, value, None, causal=True, window=window, softcap=softcap, is_packed=True
    )
    return backend not in ("sdpa", "plain")


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor | None:
    """Returns the result of `attention` if a kernel can compute it. Returns None if `attention`
    would call PyTorch's attention.
    """
    cast_dtype = autocast_dtype(query)
    if cast_dtype is not None and query.dtype != torch.float64:
        query = query.to(cast_dtype)
        key = key.to(cast_dtype)
        value = value.to(cast_dtype)
    implementation = choose_implementation(KERNELS, query, key, value)
    if not query.dtype == key.dtype == value.dtype:
        return None
    backend: Backend
    if (
        implementation == "cpp"
        and query.is_cpu
        and _cpp_supports(query.dtype, query, key, value, mask)
    ):
        backend = "cpp"
    else:
        backend = choose_backend(query.dtype, query, key, value, mask, causal=causal)
        if backend not in ("cpp", "flash", "cudnn"):
            return None
    _check_inputs(query, key, value)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out: Tensor = apply_function(
        Attention,
        query,
        key,
        value,
        mask,
        None,
        causal,
        scale,
        backend,
        None,
        None,
        implementation,
    )
    return out


def _add_document_mask(
    mask: Tensor | None, documents: Documents | None, query: Tensor
) -> Tensor | None:
    if documents is None:
        return mask
    document_mask = documents.mask(query.shape[0], query.shape[2])
    if mask is None:
        return document_mask
    return mask & document_mask


def _check_inputs(query: Tensor, key: Tensor, value: Tensor) -> None:
    problem = ""
    if not query.dim() == key.dim() == value.dim() == 4 or key.shape != value.shape:
        problem = "expected [B N S D], [B M T D] and [B M T D]"
    elif query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        problem = "batch and head size must be the same"
    elif key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        problem = f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly"
    if problem:
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        raise ShapeError(f"{shapes}: {problem}", code="SH001")
