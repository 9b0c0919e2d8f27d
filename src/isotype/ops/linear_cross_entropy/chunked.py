"""Computes the gradients of a head and its inputs without storing all logits (tokens x vocabulary).
There are two ways to compute these gradients. T is the number of tokens, N the number of tokens
that are not ignored, H the hidden size, and V the vocabulary size.

`Chunks`, `HeadGradient`   Forward computes the gradients in chunks of rows. For each chunk, it
                           overwrites the logits with their gradient and adds to the head's gradient
                           in fp32. This takes three matrix products for a trainable head and two
                           for a frozen one. All rows must have the same upstream gradient.
`gradients_by_vocabulary`  Backward computes the gradients in blocks of the vocabulary, from the
                           logsumexp that forward saved. This takes one more matrix product, but
                           needs no fp32 accumulator of V x H. Rows may have different upstream
                           gradients. It is used for a trainable head with reduction="none".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...environment.planned_device import target_device_type
from ...errors import ShapeError, UsageError
from ..backend import arithmetic_dtype, can_count_rows, has_fp32_output
from ..cross_entropy.rule import LossRule
from ..widened_products import addmm_, widens_products

# Bytes of logits that exist at once. On a CPU, products of more than 256 rows are no faster, and
# allocating a buffer takes 0.3 ms per MiB. But the head's gradient, V x H in fp32, is read and
# written once per chunk, so chunks are larger if this gradient is computed. On a GPU, a product of
# N rows makes 2 N H V operations and moves 2 H V bytes of weight and 4 N V bytes of logits. With
# 523 rows (256 MiB at V 128,256) and H 4096 this is 416 operations per byte. A product is limited
# by arithmetic above 184 operations per byte on an H200 (measured: 788 TFLOP/s and 4.3 TB/s), and
# above about 260 on an H100. The head's gradient is read and written in fp32, 8 H V bytes per
# chunk, which is N / 4 operations per byte: enough from 1,046 rows on (512 MiB).
_LOGITS_BYTES = {"cpu": 64 * 2**20}
_LOGITS_BYTES_WITH_HEAD = {"cpu": 256 * 2**20}
_DEFAULT_LOGITS_BYTES = 256 * 2**20
_DEFAULT_LOGITS_BYTES_WITH_HEAD = 512 * 2**20
_BLOCK_MULTIPLE = 64


def logits_budget(device: torch.device, with_head_gradient: bool) -> int:
    """Returns the number of bytes of logits that may exist at once. `with_head_gradient` states
    whether the head's gradient is computed too.
    """
    if with_head_gradient:
        return _LOGITS_BYTES_WITH_HEAD.get(
            target_device_type(device), _DEFAULT_LOGITS_BYTES_WITH_HEAD
        )
    return _LOGITS_BYTES.get(target_device_type(device), _DEFAULT_LOGITS_BYTES)


def fitting_block_size(
    count: int, other_count: int, itemsize: int, device: torch.device, with_head_gradient: bool
) -> int:
    """Divides `count` rows into equal blocks and returns the number of rows in a block. The logits
    of one block have `other_count` columns and must fit into the memory for logits
    (`logits_budget`). The function can also divide the classes into blocks. Then `other_count` is
    the number of rows.

    with_head_gradient  whether the head's gradient is computed too
    """
    largest_block = max(
        _BLOCK_MULTIPLE, logits_budget(device, with_head_gradient) // max(1, other_count * itemsize)
    )
    parts = max(1, -(-count // largest_block))
    block = -(-count // parts)
    return max(1, -(-block // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE)


def operand_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of the operands of a matrix product on this device. `dtype` is the declared
    dtype of the matrix product.
    """
    if dtype == torch.float16 and target_device_type(device) != "cuda":
        return torch.float32
    return dtype


def result_dtype(operand: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of the result of a matrix product with operands of this dtype."""
    if has_fp32_output(operand, device):
        return torch.float32
    return operand


def gradient_factors(operand: torch.dtype, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns (pre_scale, post_scale). The softmax is multiplied by pre_scale before it is rounded
    to the dtype `operand`. The results of the matrix products with the softmax are then multiplied
    by post_scale, unless it is None. pre_scale * post_scale equals `upstream`.

    In bf16, the softmax is multiplied by the upstream gradient before it is rounded. Computing in
    chunks then adds no rounding error. In fp16 this is not possible, because an upstream gradient
    such as 1/128k is too small to be a normal fp16 number. In fp16, the softmax is therefore
    multiplied by 1024 before it is rounded. The fp32 results of its matrix products are then
    multiplied by the upstream gradient divided by 1024.
    """
    if operand != torch.float16:
        return upstream, None
    return torch.full_like(upstream, 1024.0), upstream / 1024.0


def allocate_logits(rows: int, classes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates memory for logits or their gradient. On a GPU, each row starts at a multiple of 64
    values, since cuBLAS's fast kernels need an alignment of 16 bytes. For example, a user may add
    one token to a vocabulary of 32,000 tokens. With 32,001 logits per row and no padding, only one
    of eight rows would start at a multiple of 16 bytes.
    """
    row_stride = classes
    if target_device_type(device) == "cuda":
        row_stride = -(-classes // 64) * 64
    return torch.empty(rows, row_stride, dtype=dtype, device=device)[:, :classes]


def product(lhs: Tensor, rhs: Tensor, out: Tensor) -> Tensor:
    """Writes `lhs @ rhs` to `out`. `out` must have the dtype that `result_dtype` returns."""
    if widens_products(lhs):
        return addmm_(out, lhs, rhs, beta=0.0)
    if out.dtype == lhs.dtype:
        # operands and result have the same dtype, and the caller has switched autocast off
        return torch.mm(lhs, rhs, out=out)
    # the product is written to `out` directly. A temporary result would be as large as a chunk of
    # logits, and would be written and read once more
    return torch.mm(lhs, rhs, out_dtype=out.dtype, out=out)


def add_product_(lhs: Tensor, rhs: Tensor, total: Tensor) -> Tensor:
    """Computes `total += lhs @ rhs` in one matrix multiplication. It reads and writes `total` once
    and needs no temporary tensor. `total` must have the dtype that `result_dtype` returns.
    """
    if widens_products(lhs):
        return addmm_(total, lhs, rhs)
    if total.dtype == lhs.dtype:
        return torch.addmm(total, lhs, rhs, out=total)
    return torch.addmm(total, lhs, rhs, out_dtype=total.dtype, out=total)


def product_over_classes(dlogits_NV: Tensor, weight_VH: Tensor, out_NH: Tensor) -> Tensor:
    """Writes `dlogits @ weight` to `out`. On a CPU it computes the transposed result and copies it.
    For 1024 x 32,000 x 2048 in bf16, this is 12% faster.
    """
    device = dlogits_NV.device
    if widens_products(dlogits_NV):
        return product(dlogits_NV, weight_VH, out_NH)
    if target_device_type(device) == "cpu" and out_NH.dtype == dlogits_NV.dtype:
        return out_NH.copy_(torch.mm(weight_VH.t(), dlogits_NV.t()).t())
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        processors = _ASSUMED_MULTIPROCESSORS
    if out_NH.dtype == torch.float32:
        parts = count_vocabulary_parts(len(out_NH), out_NH.shape[1], len(weight_VH), processors)
    else:
        parts = 1
    if parts == 1:
        return product(dlogits_NV, weight_VH, out_NH)
    return product_in_parts(dlogits_NV, weight_VH, out_NH, parts)


_ASSUMED_MULTIPROCESSORS = 132  # as on an H100; used when memory is planned without a GPU
# numbers of rows and columns of the result that one thread block of cuBLAS's fast kernels computes
_TILE = (128, 256)


def count_vocabulary_parts(rows: int, columns: int, classes: int, processors: int) -> int:
    """The matrix product for the gradient of the hidden states is split into parts of the
    vocabulary, so that its tiles occupy all multiprocessors. Returns the number of parts. For
    example, a result of 512 x 4,096 has 64 tiles, so that half of the 132 multiprocessors of a GPU
    would be idle. With two parts there are 128 tiles. A part has at least 4,096 classes, so that
    adding the parts takes comparatively little time.
    """
    tiles = -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    return max(1, min(processors // tiles, classes // 4096))


def product_in_parts(lhs_NV: Tensor, rhs_VH: Tensor, out_NH: Tensor, parts: int) -> Tensor:
    """Writes `lhs @ rhs` to `out` in fp32. V is divided into equal parts. One batched matrix
    product computes the result of each part, and these results are added. The matrix product for
    the remaining classes is added last.
    """
    size = lhs_NV.shape[1] // parts // _BLOCK_MULTIPLE * _BLOCK_MULTIPLE
    lhs_PNV = lhs_NV[:, : parts * size].unflatten(1, (parts, size)).transpose(0, 1)
    rhs_PVH = rhs_VH[: parts * size].unflatten(0, (parts, size))
    if lhs_NV.dtype == out_NH.dtype:
        partial_PNH = torch.bmm(lhs_PNV, rhs_PVH)
    else:
        partial_PNH = torch.bmm(lhs_PNV, rhs_PVH, out_dtype=out_NH.dtype)
    torch.sum(partial_PNH, 0, out=out_NH)
    if parts * size == lhs_NV.shape[1]:
        return out_NH
    remainder = slice(parts * size, None)
    return add_product_(lhs_NV[:, remainder], rhs_VH[remainder], out_NH)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
    """Checks a head's tensors and the chunk size.

    Raises  ShapeError SH001 unless hidden is [*n H], weight [V H] and bias [V]; UsageError for a
            chunk of less than one row
    """
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)}: expected [*n H] and"
            " [V H]",
            code="SH001",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias {list(bias.shape)}: expected [{weight.shape[0]}]", code="SH001")
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk is {chunk}: expected 1 row or more")


def default_chunk(
    tokens: int, weight: Tensor, dtypes: Sequence[torch.dtype], with_head_gradient: bool
) -> int:
    """Returns the number of rows whose logits exist at once. `dtypes` has the dtype of the matrix
    product of each head.
    """
    bytes_per_logit = sum(
        result_dtype(operand_dtype(dtype, weight.device), weight.device).itemsize
        for dtype in dtypes
    )
    return fitting_block_size(
        tokens,
        weight.shape[0],
        bytes_per_logit,
        weight.device,
        with_head_gradient=with_head_gradient,
    )


def cast_head(
    dtype: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts the tensors of a head to the dtype of its matrix product."""
    if bias is not None:
        bias = bias.to(dtype)
    return hidden.to(dtype), weight.to(dtype), bias


def head_dtypes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """Returns the dtypes in which the gradients of a head's tensors are returned."""
    if bias is None:
        return hidden.dtype, weight.dtype, None
    return hidden.dtype, weight.dtype, bias.dtype


def cast_gradients(
    gradients: Sequence[Tensor], dtypes: Sequence[torch.dtype | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Casts each gradient to the dtype that `dtypes` has for it. A gradient that is not needed
    becomes None.
    """
    results: list[Tensor | None] = []
    for gradient, dtype, is_needed in zip(gradients, dtypes, needs):
        if is_needed and dtype is not None:
            results.append(gradient.to(dtype))
        else:
            results.append(None)
    return results


def required_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[bool, bool, bool]:
    """For each tensor, returns whether autograd needs its gradient."""
    is_enabled = torch.is_grad_enabled()
    return (
        is_enabled and hidden.requires_grad,
        is_enabled and weight.requires_grad,
        is_enabled and bias is not None and bias.requires_grad,
    )


def shape_if(is_needed: bool, shape: Sequence[int]) -> Sequence[int]:
    """Returns `shape`, or the shape of an empty tensor if the tensor is not needed."""
    if is_needed:
        return shape
    return (0,)


def empty_gradients(
    hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of hidden, weight and bias. The last two values of `rest` are
    booleans. They say whether the gradient of `hidden` and the gradient of `weight` are needed.
    """
    want_dhidden, want_dweight = rest[-2:]
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    classes = weight_VH.shape[:1]
    return (
        hidden_TH.new_empty(shape_if(want_dhidden, hidden_TH.shape), dtype=wide_dtype),
        weight_VH.new_empty(shape_if(want_dweight, weight_VH.shape), dtype=stored_dtype),
        weight_VH.new_empty(shape_if(bias_V is not None, classes), dtype=wide_dtype),
    )


class Forward(NamedTuple):
    """The results of forward. If a result is not needed, its tensor is empty.

    loss_T, lse_T  fp32[T]  the loss and the logsumexp of each row
    dhidden_TH, dweight_VH, dbias_V
                   the gradients, which forward computes together with the loss
    """

    loss_T: Tensor
    lse_T: Tensor
    dhidden_TH: Tensor
    dweight_VH: Tensor
    dbias_V: Tensor


def stored_gradient_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Returns the dtype of a gradient that is computed in forward and stored until backward. For
    fp16 inputs this dtype is fp32. The gradient is too small for fp16 until backward multiplies it
    by the upstream gradient.
    """
    if dtype == torch.float16:
        return torch.float32
    return operand_dtype(dtype, device)


def empty_outputs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    want_dhidden: bool,
    want_dweight: bool,
    want_dbias: bool,
    chunk: int,
) -> Forward:
    """Allocates outputs of the right shapes and dtypes. The outputs are filled with zeros, since
    forward does not write to ignored rows. The head's gradient is not filled, since the first chunk
    overwrites all of it.
    """
    tokens = hidden_TH.shape[0]
    classes = weight_VH.shape[:1]
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, hidden_TH.device)
    head_dtype = wide_dtype
    if tokens <= chunk:
        # a single chunk needs no fp32 accumulator: the product sums in fp32 and rounds once
        head_dtype = stored_dtype
    loss_T = hidden_TH.new_zeros(tokens, dtype=wide_dtype)
    return Forward(
        loss_T,
        torch.zeros_like(loss_T),
        hidden_TH.new_zeros(shape_if(want_dhidden, hidden_TH.shape), dtype=stored_dtype),
        hidden_TH.new_empty(shape_if(want_dweight, weight_VH.shape), dtype=head_dtype),
        hidden_TH.new_zeros(shape_if(want_dbias, classes), dtype=wide_dtype),
    )


class HeadGradient:
    """Sums `post_scale * dlogits^T x` over the chunks of rows, and writes the sum to `total_VH`.
    The first chunk overwrites `total_VH`, so `total_VH` may be uninitialised.

    If the matrix product has another dtype than `total_VH`, or is multiplied by a factor, it is
    computed in blocks of the vocabulary. All blocks share one buffer. Allocating a new buffer for
    each block would take as long as the matrix product. We measured 204 ms instead of 98 ms with
    one thread, 1,024 rows and a head of 8,192 x 2,048.
    """

    def __init__(self, total_VH: Tensor, post_scale: Tensor | None) -> None:
        self.total_VH = total_VH
        self.post_scale = post_scale
        self.is_first = True
        self.buffer: Tensor | None = None
        self.wide_buffer: Tensor | None = None

    def add(self, dlogits_NV: Tensor, x_NH: Tensor) -> None:
        """Adds the matrix product of one chunk to `total_VH`."""
        total = self.total_VH
        is_first = self.is_first
        self.is_first = False
        output_dtype = result_dtype(x_NH.dtype, x_NH.device)
        if total.dtype == output_dtype and self.post_scale is None:
            if is_first:
                product(dlogits_NV.t(), x_NH, total)
            else:
                add_product_(dlogits_NV.t(), x_NH, total)
            return
        classes, hidden = total.shape
        size = fitting_block_size(classes, hidden, 4 * 4, x_NH.device, with_head_gradient=True)
        size = min(classes, size)
        if self.buffer is None:
            self.buffer = torch.empty(size, hidden, dtype=output_dtype, device=total.device)
        for start in range(0, classes, size):
            block = slice(start, start + size)
            part = total[block]
            partial = product(dlogits_NV[:, block].t(), x_NH, self.buffer[: part.shape[0]])
            if self.post_scale is not None and is_first:
                torch.mul(partial, self.post_scale, out=part)
            elif self.post_scale is not None:
                part.addcmul_(partial, self.post_scale)
            elif is_first:
                part.copy_(partial)
            else:
                # on a CPU, adding a tensor of a narrower dtype takes 39 ms; widening the tensor and
                # then adding it takes 3 ms
                if self.wide_buffer is None:
                    self.wide_buffer = torch.empty_like(self.buffer, dtype=total.dtype)
                part.add_(self.wide_buffer[: part.shape[0]].copy_(partial))


class Chunks:
    """Computes the logits of the rows that are not ignored, `chunk` rows at a time, in buffers that
    all chunks share.

    Iteration yields (rows, x_NH, logits_NV, dlogits_NV): the rows, their hidden states in the dtype
    of the matrix product, their logits, and memory for the gradient of the logits. If the logits
    have the same dtype as the hidden states, the gradient uses the memory of the logits.
    """

    def __init__(
        self,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        rule: LossRule,
        chunk: int,
        gradients: bool,
    ) -> None:
        device = hidden_TH.device
        self.operand_dtype = operand_dtype(hidden_TH.dtype, device)
        self.result_dtype = result_dtype(self.operand_dtype, device)
        self.hidden_TH = hidden_TH
        self.weight_VH = weight_VH.to(self.operand_dtype)
        self.chunk = chunk
        self.bias_V: Tensor | None = None
        if bias_V is not None:
            self.bias_V = bias_V.to(self.result_dtype)
        self.rows = rows_to_compute(targets_T, rule)
        if isinstance(self.rows, slice):
            self.count = targets_T.numel()
        else:
            self.count = self.rows.numel()
        chunk_rows = min(chunk, self.count)
        classes = weight_VH.shape[0]
        self.logits = allocate_logits(chunk_rows, classes, self.result_dtype, device)
        if self.result_dtype == self.operand_dtype:
            self.dlogits = self.logits
        else:
            if not gradients:
                chunk_rows = 0
            self.dlogits = allocate_logits(chunk_rows, classes, self.operand_dtype, device)

    def __iter__(self) -> Iterator[tuple[slice | Tensor, Tensor, Tensor, Tensor]]:
        for start in range(0, self.count, self.chunk):
            stop = min(start + self.chunk, self.count)
            if isinstance(self.rows, slice):
                rows: slice | Tensor = slice(start, stop)
            else:
                rows = self.rows[start:stop]
            x_NH = self.hidden_TH[rows].to(self.operand_dtype)
            z_NV = product(x_NH, self.weight_VH.t(), self.logits[: stop - start])
            if self.bias_V is not None:
                z_NV.add_(self.bias_V)
            yield rows, x_NH, z_NV, self.dlogits[: stop - start]

    def write_dhidden(
        self,
        dhidden_TH: Tensor,
        rows: slice | Tensor,
        dlogits_NV: Tensor,
        post_scale: Tensor | None,
    ) -> None:
        """Computes the gradient of these rows of the hidden states, multiplies it by `post_scale`
        and writes it to `dhidden_TH`.
        """
        if isinstance(rows, slice) and post_scale is None and dhidden_TH.dtype == self.result_dtype:
            product_over_classes(dlogits_NV, self.weight_VH, dhidden_TH[rows])
            return
        dx_NH = torch.empty(
            dlogits_NV.shape[0],
            self.weight_VH.shape[1],
            dtype=self.result_dtype,
            device=dlogits_NV.device,
        )
        product_over_classes(dlogits_NV, self.weight_VH, dx_NH)
        if post_scale is not None:
            dx_NH = dx_NH * post_scale
        dhidden_TH[rows] = dx_NH.to(dhidden_TH.dtype)


def rows_to_compute(targets_T: Tensor, rule: LossRule) -> Tensor | slice:
    """Returns the rows that are not ignored, as int[N] or as a slice of all rows. On a GPU it
    returns all rows, since the CPU would have to wait until the GPU has counted the rows. The
    ignored rows are then computed too, and their results are set to zero. A caller that has the
    labels in CPU memory can drop the ignored rows before it calls the op.
    """
    if not can_count_rows(targets_T):
        return slice(None)
    counted_rows_N = (targets_T != rule.ignore_index).nonzero().squeeze(-1)
    if counted_rows_N.numel() == targets_T.numel():
        return slice(None)
    return counted_rows_N


def largest_gradient(*upstream_N: Tensor) -> Tensor:
    """Returns the largest upstream gradient among all rows. The gradient of the logits can be as
    large as this value, so its dtype must be able to represent the value.
    """
    tiny = torch.finfo(upstream_N[0].dtype).tiny
    maxima = []
    for gradient in upstream_N:
        if gradient.numel():
            maxima.append(gradient.abs().amax())
        else:
            maxima.append(gradient.new_ones(()))
    return torch.stack(maxima).amax().clamp_min(tiny)


def gradients_by_vocabulary(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rows: Tensor | slice,
    upstream_size: Tensor,
    write_gradient: Callable[[Tensor, Tensor, int, Tensor | None], None],
    want_dhidden: bool,
    want_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of hidden, weight and bias from the gradients of the logits. It
    computes the logits again, one block of the vocabulary at a time.

    rows            the result of `rows_to_compute`
    upstream_size   the largest upstream gradient of any row
    write_gradient  (z, out, first_class, factor): writes the gradient of the block's logits `z` to
                    `out`; `first_class` is the class of column 0; every upstream gradient is
                    multiplied by `factor`, unless it is None
    """
    device = hidden_TH.device
    products_dtype = operand_dtype(hidden_TH.dtype, device)
    output_dtype = result_dtype(products_dtype, device)
    wide_dtype = arithmetic_dtype(hidden_TH.dtype)
    x_NH = hidden_TH[rows].to(products_dtype)
    pre_scale, post_scale = gradient_factors(products_dtype, upstream_size)
    factor = None
    if post_scale is not None:
        factor = pre_scale / upstream_size
    classes = weight_VH.shape[0]
    block_classes = fitting_block_size(
        weight_VH.shape[0], x_NH.shape[0], output_dtype.itemsize, device, with_head_gradient=True
    )
    dx_NH = torch.zeros(x_NH.shape, dtype=wide_dtype, device=device)
    stored_dtype = stored_gradient_dtype(hidden_TH.dtype, device)
    weight_shape = shape_if(want_dweight, weight_VH.shape)
    bias_shape = shape_if(bias_V is not None, (classes,))
    dweight_VH = torch.empty(weight_shape, dtype=stored_dtype, device=device)
    dbias_V = torch.zeros(bias_shape, dtype=wide_dtype, device=device)
    for start in range(0, classes, block_classes):
        block = slice(start, min(start + block_classes, classes))
        w = weight_VH[block].to(products_dtype)
        z = product(
            x_NH, w.t(), torch.empty(x_NH.shape[0], w.shape[0], dtype=output_dtype, device=device)
        )
        if bias_V is not None:
            z.add_(bias_V[block].to(z.dtype))
        g = z
        if output_dtype != products_dtype:
            g = torch.empty(z.shape, dtype=products_dtype, device=device)
        write_gradient(z, g, start, factor)
        if want_dweight:
            HeadGradient(dweight_VH[block], post_scale).add(g, x_NH)
        if bias_V is not None:
            dbias_N = g.sum(0, dtype=wide_dtype)
            if post_scale is not None:
                dbias_N = dbias_N * post_scale
            dbias_V[block] = dbias_N
        if want_dhidden:
            dx_NH += product_over_classes(
                g, w, torch.empty(x_NH.shape, dtype=output_dtype, device=device)
            )
    hidden_shape = shape_if(want_dhidden, hidden_TH.shape)
    dhidden_TH = torch.zeros(hidden_shape, dtype=wide_dtype, device=device)
    if want_dhidden:
        if post_scale is not None:
            dx_NH.mul_(post_scale)
        dhidden_TH[rows] = dx_NH
    return dhidden_TH, dweight_VH, dbias_V


def scale_to_dtype(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies `x` by `factor` and returns the result in `dtype`. For a large `x`, this needs no
    copy of `x` in a wider dtype.
    """
    if torch.compiler.is_compiling() or x.numel() < 2**22 or x.dtype == dtype == factor.dtype:
        return (x * factor).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if target_device_type(x.device) == "cuda":
        # one kernel widens and narrows each value. The loop below would make 1,500 launches for a
        # head of 128k x 4,096
        return torch.mul(x, factor, out=out)
    step = max(1, 2**20 // max(1, x[0].numel()))
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        row_factor = factor
        if factor.dim():
            row_factor = factor[part]
        out[part] = x[part].to(factor.dtype) * row_factor
    return out
