"""Defines `PackedState`, which holds the layout and the scales of a packed weight and dequantises
the weight to a float dtype.

A weight is dequantised a few rows at a time, so that its fp32 values never exist all at once. On a
CPU, the rows that are processed at once fit into the cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import uses_cpp, uses_fused_kernel
from ..cpp import CppKernels
from ..library import library_op
from . import formats
from .formats import AWQ_ORDER, KINDS, Layout, Tensors, decode_exponents, unpack_words, unpack_zeros

# elements that are dequantised at once, so that they fit into a cache
_CPU_PIECE_ELEMENTS = 1 << 18
_GPU_PIECE_ELEMENTS = 1 << 26  # elements that are dequantised at once


def elements_per_piece(tensor: Tensor) -> int:
    """Returns the number of elements that are processed at once on the tensor's device."""
    return _CPU_PIECE_ELEMENTS if tensor.is_cpu else _GPU_PIECE_ELEMENTS


# --- a kernel for formats whose numbers are in order along a row, in blocks with one scale: fp8,
# int8, int4 in rows, nvfp4, mxfp4. Its results are bit-identical to those of `formats`. Columns in
# another order (act-order) and fp64 are widened by `formats`

KERNELS = CppKernels(__file__, in_graphs=True, widen="dppppiiiiiiii")
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


class BlockScaled(NamedTuple):
    """A quantised weight. Its real values are (number - zero) * scale.

    kind         the kind of a packed element, a key of `formats.KINDS`
    packed       uint8[rows bytes]
    scale, zero  fp32[blocks groups]; the first block is the one that contains the first row
    """

    kind: str
    packed: Tensor
    scale: Tensor
    zero: Tensor | None


def to_block_scaled(tensors: Tensors, rows: slice, layout: Layout) -> BlockScaled | None:
    """Returns these rows of a weight as `BlockScaled`, or None if the format has no such form. The
    arguments are the same as for the functions in `formats`.
    """
    height = layout.block[0]
    blocks = slice(rows.start // height, -(-rows.stop // height))

    def read_scales(name: str) -> Tensor:
        values = tensors[name][blocks]
        return (
            decode_exponents(values, torch.float32)
            if layout.has_exponent_scales and name == "weight_scale"
            else values.float()
        ).contiguous()

    if layout.format == "scaled":
        zero = read_scales("weight_zero_point") if "weight_zero_point" in tensors else None
        return BlockScaled(
            _FP8[tensors["weight"].dtype],
            tensors["weight"][rows].view(torch.uint8),
            read_scales("weight_scale"),
            zero,
        )
    if layout.format == "int8_rows":
        return BlockScaled(
            "int8",
            tensors["weight"][rows].view(torch.uint8),
            tensors["SCB"][rows, None].float() / 127,
            None,
        )
    if layout.shape[1] % 2 or layout.block[1] % 2:
        return None
    if layout.format == "packed_rows" and "weight_g_idx" not in tensors:
        packed = tensors["weight_packed"][rows].view(torch.uint8)
        zero = (
            unpack_zeros(tensors, rows, layout).float() if "weight_zero_point" in tensors else None
        )
        # numbers of 8 bits are stored with an offset of 128, which is int8 with the highest bit
        # inverted
        return BlockScaled(
            "int4" if layout.bits == 4 else "int8",
            packed if layout.bits == 4 else packed ^ 128,
            read_scales("weight_scale"),
            zero,
        )
    if layout.format == "nvfp4":
        if "weight_scale_2" in tensors:
            tensor_scale = tensors["weight_scale_2"].float()
        else:
            tensor_scale = 1 / tensors["weight_global_scale"].float()
        packed = tensors["weight"] if "weight" in tensors else tensors["weight_packed"]
        return BlockScaled("fp4", packed[rows], read_scales("weight_scale") * tensor_scale, None)
    if layout.format == "mxfp4":
        return BlockScaled(
            "fp4",
            tensors["weight_packed"][rows],
            decode_exponents(tensors["weight_scale"][rows], torch.float32),
            None,
        )
    return None


@library_op(
    "widen_packed_(Tensor(a!) out, Tensor packed, Tensor scale, Tensor? zero, int kind, int first,"
    " int height, int width) -> ()",
    fake=lambda *_: None,
)
def _widen_(
    out: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: int,
    first: int,
    height: int,
    width: int,
) -> None:
    rows, columns = out.shape
    packed = packed if packed.stride(-1) == 1 else packed.contiguous()
    if uses_cpp(KERNELS, out):
        strides = packed.stride(0), out.stride(0)
        KERNELS(
            "widen",
            out.dtype,
            packed,
            scale,
            zero,
            out,
            rows,
            columns,
            *strides,
            kind,
            first,
            height,
            width,
        )
    else:
        from . import triton

        triton.widen_(out, packed, scale, zero, kind, first, height, width)


def _widen_by_kernel(tensors: Tensors, rows: slice, layout: Layout, out: Tensor) -> bool:
    """Dequantises these rows and writes them into the first K columns of `out`, whose columns are
    adjacent in memory. Returns False if no kernel supports the format.
    """
    if not (uses_cpp(KERNELS, out) or uses_fused_kernel("packed", out)):
        return False
    block_scaled = to_block_scaled(tensors, rows, layout)
    if block_scaled is not None:
        _widen_(
            out[:, : layout.shape[1]],
            block_scaled.packed,
            block_scaled.scale,
            block_scaled.zero,
            KINDS[block_scaled.kind],
            rows.start,
            *layout.block,
        )
    return block_scaled is not None


# --- the state


class PackedState:
    """Holds the layout and the scales of a packed weight. The packed bytes are not part of the
    state: they are the parameter of the layer.

    shape       of the dequantised weight
    dtype_name  one of `fp8 int8 int4 nvfp4 mxfp4 gguf`, as in the setting `precision.base`
    tensors     scales, zero points and similar tensors, under the file's names
    """

    def __init__(self, layout: Layout, dtype_name: str, tensors: dict[str, Tensor]) -> None:
        self.layout = layout
        self.dtype_name = dtype_name
        self.tensors = tensors
        self.shape = torch.Size(layout.shape)

    def dequantise(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weight in `dtype`. It is computed in fp32 (in fp64 if `dtype` is fp64) and
        rounded once.

        packed  uint8[...]  the bytes of the file's tensor
        ->      dtype[O, K]
        """
        out = torch.empty(self.shape, dtype=dtype, device=packed.device)
        if packed.is_meta:
            return out
        return self.dequantise_rows(packed, slice(0, self.shape[0]), out)

    def dequantise_rows(self, packed: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Writes these rows into `out`. The index of the first row must be a multiple of
        `layout.align`.
        """
        layout = self.layout
        columns = self.shape[1]
        name, dtype, shape = layout.packed_tensor
        tensors = {**self.tensors, name: packed.reshape(-1).view(dtype).view(shape)}
        if _widen_by_kernel(tensors, rows, layout, out):
            return out
        wide = torch.promote_types(torch.float32, out.dtype)
        decode: Callable[..., Tensor] = getattr(formats, layout.format)
        step = max(1, elements_per_piece(packed) // (columns * layout.align)) * layout.align
        for start in range(rows.start, rows.stop, step):
            piece = slice(start, min(start + step, rows.stop))
            out[piece.start - rows.start : piece.stop - rows.start] = decode(
                tensors, piece, wide, layout
            )
        return out

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Returns a copy with `function` applied to each tensor."""
        state = copy.copy(self)
        state.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return state

    def to_device(self, device: torch.device) -> Self:
        """Returns the state on this device. Dtypes do not change."""
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        return self.map_tensors(lambda tensor: tensor.to(device))


class StackState(PackedState):
    """The state of the stacked matrices of a mixture of experts. Only a few matrices are
    dequantised at a time.

    layout      the layout of one piece [O K] of an expert. A piece is usually the whole matrix of
                the expert. If gate and up are stacked in one matrix, each of them is a piece
    tensors     [E pieces ...]
    experts     E
    pieces      the number of pieces of one expert
    transposed  whether a matrix is stored as [K O] in the model
    """

    def __init__(
        self,
        layout: Layout,
        dtype_name: str,
        tensors: dict[str, Tensor],
        *,
        experts: int,
        pieces: int,
        transposed: bool,
    ) -> None:
        super().__init__(layout, dtype_name, tensors)
        self.experts = experts
        self.pieces = pieces
        self.transposed = transposed
        rows = self.pieces * layout.shape[0]
        columns = layout.shape[1]
        self.shape = torch.Size(
            (self.experts, columns, rows) if transposed else (self.experts, rows, columns)
        )

    def dequantise(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the matrices of all experts in the model's layout: dtype[E O K], or dtype[E K O]."""
        wide = self.dequantise_experts(packed, slice(0, self.experts), dtype)
        return wide.transpose(1, 2) if self.transposed else wide

    def dequantise_experts(self, packed: Tensor, experts: slice, dtype: torch.dtype) -> Tensor:
        """Returns the matrices of some experts, as dtype[E O K] for both layouts."""
        rows, columns = self.layout.shape
        out = torch.empty(
            experts.stop - experts.start,
            self.pieces * rows,
            columns,
            dtype=dtype,
            device=packed.device,
        )
        pieces = packed.view(self.experts, self.pieces, -1)
        for expert in range(experts.start, experts.start if packed.is_meta else experts.stop):
            for piece in range(self.pieces):
                piece_state = PackedState(
                    self.layout,
                    self.dtype_name,
                    {name: tensor[expert, piece] for name, tensor in self.tensors.items()},
                )
                piece_out = out[expert - experts.start, piece * rows : (piece + 1) * rows]
                piece_state.dequantise_rows(pieces[expert, piece], slice(0, rows), piece_out)
        return out


def _fake_widen_4bit(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    inner_absmax: Any,
    inner_code: Any,
    offset: Any,
    blocksize: int,
    inner_blocksize: int,
    shape: Any,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty([shape[0], shape[1]], dtype=dtype, device=packed.device)


@library_op(
    "widen_4bit(Tensor packed, Tensor absmax, Tensor code, Tensor? inner_absmax, Tensor?"
    " inner_code, Tensor? offset, int blocksize, int inner_blocksize, SymInt[] shape, ScalarType"
    " dtype) -> Tensor",
    fake=_fake_widen_4bit,
)
def _widen_4bit(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    inner_absmax: Tensor | None,
    inner_code: Tensor | None,
    offset: Tensor | None,
    blocksize: int,
    inner_blocksize: int,
    shape: Any,
    dtype: torch.dtype,
) -> Tensor:
    from . import triton

    out = torch.empty([shape[0], shape[1]], dtype=dtype, device=packed.device)
    triton.widen_4bit(
        packed, absmax, code, inner_absmax, inner_code, offset, blocksize, inner_blocksize, out
    )
    return out


def dequantise_4bit(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Returns a weight of bitsandbytes' 4-bit formats in `dtype`. It is computed in fp32 and
    rounded once.

    packed  any dtype; two values per byte, the first in the high half
    state   the weight's QuantState: nf4 or fp4, with scales that are fp32 or quantised too
    ->      dtype[O, K]
    """
    if (
        uses_fused_kernel("packed", packed)
        and dtype != torch.float64
        and packed.is_contiguous()
        and state.code is not None
        and state.blocksize % 16 == 0
    ):
        if state.nested:
            nested = (state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize)
        else:
            nested = (None, None, None, 1)
        scales, scale_code, offset, block = nested
        bytes_ = packed.view(torch.uint8)
        return _widen_4bit(
            bytes_,
            state.absmax,
            state.code,
            scales,
            scale_code,
            offset,
            state.blocksize,
            block,
            list(state.shape),
            dtype,
        )
    ops = torch.ops.bitsandbytes
    absmax = state.absmax
    if state.nested:
        quantised = state.state2
        absmax = ops.dequantize_blockwise.default(
            absmax, quantised.absmax, quantised.code, quantised.blocksize, torch.float32
        )
        absmax = absmax + state.offset
    # bitsandbytes 0.50.2 returns wrong values for fp64 on a CPU, without an error
    kernel_dtype = torch.float32 if dtype == torch.float64 else dtype
    weight: Tensor = ops.dequantize_4bit.default(
        packed.view(-1, 1),
        absmax,
        state.blocksize,
        state.quant_type,
        list(state.shape),
        kernel_dtype,
    )
    return weight.to(dtype)


def dequantise_packed(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """Dequantises a packed weight to `dtype`.

    state  a `PackedState`, or the QuantState of a 4-bit weight of bitsandbytes
    """
    if isinstance(state, PackedState):
        return state.dequantise(packed, dtype)
    return dequantise_4bit(packed, state, dtype)


def pack_weight(weight: Tensor, dtype_name: str) -> tuple[Tensor, PackedState]:
    """Packs a float weight [O K] as `fp8` or `int8` with one fp32 scale per row. Returns (packed
    weight, state).

    The largest absolute value of a row is stored as the largest number of the format.
    """
    rows, columns = weight.shape
    dtype, largest = (torch.float8_e4m3fn, 448.0) if dtype_name == "fp8" else (torch.int8, 127.0)
    packed = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scale = weight.new_empty(rows, 1, dtype=torch.float32)
    step = rows if weight.is_meta else max(1, elements_per_piece(weight) // columns)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        values = weight[piece].float()
        largest_value = values.abs().amax(1, keepdim=True)
        scale[piece] = torch.where(largest_value > 0, largest_value / largest, 1.0)
        values = (values / scale[piece]).clamp_(-largest, largest)
        packed[piece] = values.to(dtype) if dtype_name == "fp8" else values.round_().to(dtype)
    layout = Layout("scaled", (rows, columns), ("weight", dtype, (rows, columns)), (1, columns))
    return packed, PackedState(layout, dtype_name, {"weight_scale": scale})


# --- repacking of GPTQ and AWQ. A word of these formats holds numbers of eight rows or columns, so
# a single row cannot be widened alone. When a layer is loaded, its numbers are packed again along
# the rows, which takes the same number of bytes


def pack_along_rows(weight: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
    """Repacks a GPTQ or AWQ weight into the format of `formats.packed_rows`. Other formats, and
    weights with columns in another order (act-order), are returned unchanged.

    weight  int32, `qweight`
    ->      (int32[O ceil(K bits / 32)], state), with zero points as int16[O G] from which half of
            their range is subtracted
    """
    layout = state.layout
    source = state.tensors
    if layout.format not in ("gptq", "awq") or "g_idx" in source:
        return weight, state
    (rows, columns), per_word = layout.shape, 32 // layout.bits
    packed = weight.new_empty(rows, -(-columns // per_word))
    for start in range(
        0,
        0 if weight.is_meta else rows,
        step := max(1, elements_per_piece(weight) // (8 * columns)) * 8,
    ):
        piece = slice(start, min(start + step, rows))
        packed[piece] = pack_words(
            _unpack_rows({"qweight": weight}, "qweight", piece, layout), layout.bits
        )
    zero = (
        _unpack_rows(source, "qzeros", slice(0, rows), layout)
        + layout.first_zero
        - 2 ** (layout.bits - 1)
    )
    tensors = {
        "weight_scale": source["scales"].t().contiguous(),
        "weight_zero_point": zero.to(torch.int16).contiguous(),
    }
    new_layout = Layout(
        "packed_rows",
        layout.shape,
        ("weight_packed", torch.int32, tuple(packed.shape)),
        layout.block,
        layout.bits,
    )
    return packed, PackedState(new_layout, state.dtype_name, tensors)


def _unpack_rows(tensors: Tensors, name: str, rows: slice, layout: Layout) -> Tensor:
    """Unpacks rows of the weight as int32[rows K], or of the zero points as int32[rows G]."""
    numbers: Tensor
    if name == "qweight" and layout.format == "gptq":
        numbers = unpack_words(tensors[name][:, rows], layout.bits, 0).t()
    else:
        word_rows = tensors[name][
            :, rows.start * layout.bits // 32 : -(-rows.stop * layout.bits // 32)
        ]
        numbers = unpack_words(
            word_rows, layout.bits, 1, AWQ_ORDER if layout.format == "awq" else range(8)
        ).t()[: rows.stop - rows.start]
    return numbers


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Packs the numbers of a row into words of 32 bits. The first number is in the lowest bits. The
    last word is padded with zeros.
    """
    per_word = 32 // bits
    padded: Tensor = (
        F.pad(numbers, (0, -numbers.shape[1] % per_word)).long().unflatten(1, (-1, per_word))
    )
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    packed: Tensor = (padded << shifts).sum(-1).to(torch.int32)
    return packed
