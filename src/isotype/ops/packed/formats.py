"""Decodes published formats of packed (quantised) weights. For each format, there is a function in
plain PyTorch that follows the definition of the format.

A function gets the tensors of one weight and the range of rows that it decodes. The tensors have
the same names as in the checkpoint file. The function computes in the dtype `wide` (fp32, or fp64
on request) and returns a new tensor, which the caller rounds once.

tensors  the weight's tensors; scales and zero points as in the file
rows     the rows to decode; the first must be a multiple of `Layout.align`
->       wide[rows K]

O is the number of output features, K the number of input features, and G the number of groups into
which the K input features are divided. A word of 32 bits holds 8 numbers of 4 bits, or 4 numbers of
8 bits, with the first number in the lowest bits. A byte holds two numbers of 4 bits, with the first
in the low half.

Source: compressed-tensors 0.20 (`compressors/`), AutoGPTQ and GPTQModel (`qlinear`), AutoAWQ
(`WQLinear_GEMM`), bitsandbytes 0.50 (`int8_vectorwise_dequant`), NVIDIA ModelOpt (`NVFP4QTensor`),
OCP Microscaling Formats 1.0, DeepSeek-V3's `inference/kernel.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ggml import decode_blocks

# the kinds of a packed element; the C++ source has the same numbers
KINDS = {"e4m3": 0, "e5m2": 1, "int8": 2, "fp4": 3, "int4": 4}
FOUR_BIT_KINDS = ("fp4", "int4")  # two of these elements are in one byte

Tensors = Mapping[str, Tensor]
# Tensor.sub_ or Tensor.mul_
InPlace = Callable[[Tensor, Tensor], Tensor]

# the positions of columns 0 to 7 in a word of AWQ
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Layout:
    """The layout of one packed weight.

    format               the name of a function of this file
    shape                [O K] of the decoded weight
    packed_tensor        name, dtype and shape of the file's tensor that is the parameter, as uint8
    block                rows and columns that share a scale
    bits                 number of bits of an integer
    first_zero           the number that is added to a stored zero point
    has_exponent_scales  whether scales are ue8m0 bytes
    """

    format: str
    shape: tuple[int, int]
    packed_tensor: tuple[str, torch.dtype, tuple[int, ...]]
    block: tuple[int, int]
    bits: int = 8
    first_zero: int = 0
    has_exponent_scales: bool = False

    @property
    def align(self) -> int:
        """Returns the number by which the number of decoded rows must be divisible. The rows then
        contain only whole blocks and whole words of packed values, in every format.
        """
        return math.lcm(self.block[0], 8)


def scaled(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes 8-bit floats or integers with a scale per tensor, per row, or per block of rows and
    columns. The last block may be smaller.

    weight             fp8 or int8 [O K]
    weight_scale       any float [1], [O], [O 1] or [O/block K/block]; `weight_scale_inv` in
                       DeepSeek's files
    weight_zero_point  int8, with the shape of the scale, or absent
    """
    values = tensors["weight"][rows].to(wide)
    if "weight_zero_point" in tensors:
        _apply_by_block(values, tensors["weight_zero_point"], rows, wide, layout, torch.Tensor.sub_)
    return _apply_by_block(values, tensors["weight_scale"], rows, wide, layout, torch.Tensor.mul_)


def int8_rows(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes bitsandbytes' int8. `SCB` has the largest absolute value of each row, which is stored
    as 127.
    """
    return tensors["weight"][rows].to(wide).mul_((tensors["SCB"][rows].to(wide) / 127)[:, None])


def packed_rows(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes the 4-bit or 8-bit integers of compressed-tensors. The integers are stored with an
    offset of half their range.

    weight_packed      int32[O ceil(K bits / 32)]
    weight_scale       any float [O G] or [O 1]
    weight_zero_point  int32[ceil(O bits / 32) G], packed along the rows; or int16[O G] after the
                       offset is subtracted (`pack_along_rows`); or absent
    weight_g_idx       int32[K], the group of each column, or absent if groups are contiguous
    """
    half = 2 ** (layout.bits - 1)
    values = (
        unpack_words(tensors["weight_packed"][rows], layout.bits, 1)[:, : layout.shape[1]] - half
    ).to(wide)
    if "weight_zero_point" in tensors:
        _apply_by_group(
            values,
            unpack_zeros(tensors, rows, layout).to(wide),
            tensors.get("weight_g_idx"),
            layout,
            torch.Tensor.sub_,
        )
    return _apply_by_group(
        values,
        tensors["weight_scale"][rows].to(wide),
        tensors.get("weight_g_idx"),
        layout,
        torch.Tensor.mul_,
    )


def unpack_zeros(tensors: Tensors, rows: slice, layout: Layout) -> Tensor:
    """Returns the zero points for `packed_rows` as [rows G]. The offset with which the file stores
    them is already subtracted.
    """
    if tensors["weight_zero_point"].dtype == torch.int16:
        return tensors["weight_zero_point"][rows]
    zero: Tensor = unpack_words(tensors["weight_zero_point"], layout.bits, 0)[rows] - 2 ** (
        layout.bits - 1
    )
    return zero


def gptq(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes GPTQ's integers of 4 or 8 bits, which are packed along K.

    qweight  int32[K bits/32 O]
    qzeros   int32[G O bits/32]; in files of GPTQ's first version, 1 is subtracted from them
             (`layout.first_zero` is then 1)
    scales   any float [G O]
    g_idx    int32[K], the group of each column (act-order), or absent
    """
    per_word = 32 // layout.bits
    zero = unpack_words(
        tensors["qzeros"][:, rows.start // per_word : -(-rows.stop // per_word)], layout.bits, 1
    )[:, : rows.stop - rows.start]
    zero = (zero + layout.first_zero).t().to(wide)
    values = unpack_words(tensors["qweight"][:, rows], layout.bits, 0).t().to(wide)
    _apply_by_group(values, zero, tensors.get("g_idx"), layout, torch.Tensor.sub_)
    return _apply_by_group(
        values,
        tensors["scales"][:, rows].to(wide).t(),
        tensors.get("g_idx"),
        layout,
        torch.Tensor.mul_,
    )


def awq(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes AWQ's 4-bit integers (gemm), which are packed along O in the order `AWQ_ORDER`.

    qweight  int32[K O/8]
    qzeros   int32[G O/8]
    scales   any float [G O]
    """
    word_range = slice(rows.start // 8, -(-rows.stop // 8))
    q, zero = (
        unpack_words(tensors[name][:, word_range], 4, 1, AWQ_ORDER).to(wide).t()
        for name in ("qweight", "qzeros")
    )
    values = _apply_by_group(q, zero, None, layout, torch.Tensor.sub_)
    return _apply_by_group(
        values, tensors["scales"][:, rows].to(wide).t(), None, layout, torch.Tensor.mul_
    )


def nvfp4(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes NVFP4, which consists of 4-bit floats with an fp8 scale per 16 values of a row and a
    scale per tensor. Values are divided by the tensor's scale in compressed-tensors, and multiplied
    by it in ModelOpt.

    weight_packed        uint8[O K/2], `weight` in ModelOpt
    weight_scale         fp8[O K/16]
    weight_global_scale  fp32[1], or `weight_scale_2`
    """
    if "weight_scale_2" in tensors:
        tensor_scale = tensors["weight_scale_2"].to(wide)
    else:
        tensor_scale = 1 / tensors["weight_global_scale"].to(wide)
    packed = tensors["weight"] if "weight" in tensors else tensors["weight_packed"]
    return _apply_by_group(
        _decode_fp4(packed[rows], wide),
        tensors["weight_scale"][rows].to(wide) * tensor_scale,
        None,
        layout,
        torch.Tensor.mul_,
    )


def mxfp4(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes MXFP4, which consists of 4-bit floats. For every 32 values of a row there is one
    scale, which is a power of two.

    weight_packed  uint8[O K/2]
    weight_scale   uint8[O K/32], exponents with a bias of 127
    """
    return _apply_by_group(
        _decode_fp4(tensors["weight_packed"][rows], wide),
        decode_exponents(tensors["weight_scale"][rows], wide),
        None,
        layout,
        torch.Tensor.mul_,
    )


def ggml(tensors: Tensors, rows: slice, wide: torch.dtype, layout: Layout) -> Tensor:
    """Decodes the blocks of a GGUF file. The blocks are stored as uint8[O bytes]. The name of the
    tensor is the kind of block, such as Q4_K.
    """
    return decode_blocks(layout.packed_tensor[0], tensors[layout.packed_tensor[0]][rows], wide)


def decode_exponents(scale: Tensor, wide: torch.dtype) -> Tensor:
    """Decodes ue8m0 bytes to powers of two. The byte 255 is decoded to NaN."""
    if scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    powers = torch.ldexp(torch.ones_like(scale, dtype=wide), scale.int() - 127)
    return powers.masked_fill_(scale == 255, torch.nan)


def _decode_fp4(packed: Tensor, wide: torch.dtype) -> Tensor:
    """Decodes 4-bit floats, whose bits are sign, exponent, exponent, mantissa."""
    magnitudes = torch.tensor(
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=wide, device=packed.device
    )
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    numbers: Tensor = torch.cat((magnitudes, -magnitudes))[codes]
    return numbers


def unpack_words(packed: Tensor, bits: int, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """Unpacks numbers that are stored in 32-bit words. They are unpacked along `dim`, as int32."""
    shifts = torch.tensor(
        [bits * at for at in order[: 32 // bits]], device=packed.device, dtype=torch.int32
    )
    if dim == 0:
        spread = packed[:, None, :] >> shifts[:, None]
    else:
        spread = packed[..., None] >> shifts
    numbers: Tensor = (spread & (2**bits - 1)).flatten(dim, dim + 1)
    return numbers


def _apply_by_group(
    values: Tensor,
    group_values: Tensor,
    column_groups: Tensor | None,
    layout: Layout,
    apply: InPlace,
) -> Tensor:
    """Changes the values [rows K] in place. `apply`, for example `Tensor.mul_`, combines each of
    them with the value of its group in `group_values` [rows G].
    """
    size = layout.block[1]
    if column_groups is not None:
        # indexed in the order of memory, which is by columns in GPTQ's files
        is_column_major = group_values.stride(0) == 1
        apply(
            values,
            group_values.t().index_select(0, column_groups).t()
            if is_column_major
            else group_values.index_select(1, column_groups),
        )
    elif values.shape[1] % size == 0:
        apply(values.unflatten(1, (-1, size)), group_values[..., None])
    else:
        apply(values, group_values.repeat_interleave(size, 1)[:, : values.shape[1]])
    return values


def _apply_by_block(
    values: Tensor,
    block_values: Tensor,
    rows: slice,
    wide: torch.dtype,
    layout: Layout,
    apply: InPlace,
) -> Tensor:
    """Changes the values in place. `apply`, for example `Tensor.mul_`, combines each of them with
    the value of its block in `block_values` [O/block K/block].
    """
    height = layout.block[0]
    first = rows.start // height
    block_values = block_values[first : -(-rows.stop // height)]
    block_values = (
        decode_exponents(block_values, wide)
        if layout.has_exponent_scales
        else block_values.to(wide)
    )
    full_blocks = values.shape[0] // height
    if block_values.shape[1] == 1 and height == 1:
        return apply(values, block_values)
    if block_values.shape[1] > 1:
        block_values = block_values.repeat_interleave(layout.block[1], 1)[:, : values.shape[1]]
    if full_blocks:
        apply(
            values[: full_blocks * height].unflatten(0, (full_blocks, height)),
            block_values[:full_blocks, None],
        )
    if full_blocks * height < values.shape[0]:
        apply(values[full_blocks * height :], block_values[full_blocks:])
    return values
