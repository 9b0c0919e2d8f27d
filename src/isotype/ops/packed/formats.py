"""Published formats of a frozen weight, by their definition: one function a format, in plain torch.

A function takes the tensors of one weight under the names of its file, and the rows to widen. It
computes in `wide` (fp32, or fp64 where that is asked for) and gives fresh memory, which the caller
narrows once.

    t       the weight's tensors; scales and zero points as the file has them
    rows    of the weight: a multiple of `Layout.align` but for the last
    ->      wide[rows K]

O out features, K in features, G groups of K. A word of 32 bits holds 8 numbers of 4 bits or 4 of 8
bits, the lowest bits first; a byte holds two numbers of 4 bits, the low half first.

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

from .ggml import decoded

# the kinds of a packed element; the C++ source has the same numbers
KINDS = {"e4m3": 0, "e5m2": 1, "int8": 2, "fp4": 3, "int4": 4}
HALVES = ("fp4", "int4")

Tensors = Mapping[str, Tensor]
# Tensor.sub_ or Tensor.mul_
InPlace = Callable[[Tensor, Tensor], Tensor]

# where columns 0 to 7 of a word of AWQ lie
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Layout:
    """How one weight is packed.

    format      a function of this file
    shape       [O K] of the weight that the bytes mean
    main        the tensor of the file that autograd sees as the weight, as uint8: its name, dtype
                and shape
    block       rows and columns that share a scale
    bits        of an integer
    first_zero  what is added to a stored zero point
    powers      whether scales are ue8m0 bytes
    """

    format: str
    shape: tuple[int, int]
    main: tuple[str, torch.dtype, tuple[int, ...]]
    block: tuple[int, int]
    bits: int = 8
    first_zero: int = 0
    powers: bool = False

    @property
    def align(self) -> int:
        """Rows of a piece are a multiple of this: whole blocks, and whole words of every packing."""
        return math.lcm(self.block[0], 8)


def scaled(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """8-bit floats or integers with a scale for the tensor, a row or a block of rows and columns;
    the last block may be smaller.

    weight             fp8 or int8 [O K]
    weight_scale       any float [1], [O], [O 1] or [O/block K/block]; `weight_scale_inv` in
                       DeepSeek's files
    weight_zero_point  int8, the shape of the scale, or absent
    """
    values = t["weight"][rows].to(wide)
    if "weight_zero_point" in t:
        _each(values, t["weight_zero_point"], rows, wide, of, torch.Tensor.sub_)
    return _each(values, t["weight_scale"], rows, wide, of, torch.Tensor.mul_)


def int8_rows(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """bitsandbytes' int8: `SCB` is the largest magnitude of each row, which 127 stands for."""
    return t["weight"][rows].to(wide).mul_((t["SCB"][rows].to(wide) / 127)[:, None])


def packed_rows(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """compressed-tensors' integers of 4 or 8 bits, stored with an offset of half their range.

    weight_packed      int32[O ceil(K bits / 32)]
    weight_scale       any float [O G] or [O 1]
    weight_zero_point  int32[ceil(O bits / 32) G], packed along the rows; int16[O G], less the
                       offset (`in_rows`); or absent
    weight_g_idx       int32[K], the group of each column where they are not in order, or absent
    """
    half = 2 ** (of.bits - 1)
    values = (unpacked(t["weight_packed"][rows], of.bits, 1)[:, : of.shape[1]] - half).to(wide)
    if "weight_zero_point" in t:
        _by_group(
            values, packed_zeros(t, rows, of).to(wide), t.get("weight_g_idx"), of, torch.Tensor.sub_
        )
    return _by_group(
        values, t["weight_scale"][rows].to(wide), t.get("weight_g_idx"), of, torch.Tensor.mul_
    )


def packed_zeros(t: Tensors, rows: slice, of: Layout) -> Tensor:
    """[rows G]: the zero points of `packed_rows`, less the offset."""
    if t["weight_zero_point"].dtype == torch.int16:
        return t["weight_zero_point"][rows]
    zero: Tensor = unpacked(t["weight_zero_point"], of.bits, 0)[rows] - 2 ** (of.bits - 1)
    return zero


def gptq(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """GPTQ's integers of 4 or 8 bits, packed along K.

    qweight  int32[K bits/32 O]
    qzeros   int32[G O bits/32], less one in files of its first version (`of.first_zero` is 1)
    scales   any float [G O]
    g_idx    int32[K], the group of each column (act-order), or absent
    """
    per_word = 32 // of.bits
    zero = unpacked(t["qzeros"][:, rows.start // per_word : -(-rows.stop // per_word)], of.bits, 1)[
        :, : rows.stop - rows.start
    ]
    zero = (zero + of.first_zero).t().to(wide)
    values = unpacked(t["qweight"][:, rows], of.bits, 0).t().to(wide)
    _by_group(values, zero, t.get("g_idx"), of, torch.Tensor.sub_)
    return _by_group(
        values, t["scales"][:, rows].to(wide).t(), t.get("g_idx"), of, torch.Tensor.mul_
    )


def awq(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """AWQ's 4-bit integers (gemm), packed along O in an order of their own.

    qweight  int32[K O/8]
    qzeros   int32[G O/8]
    scales   any float [G O]
    """
    words = slice(rows.start // 8, -(-rows.stop // 8))
    q, zero = (
        unpacked(t[name][:, words], 4, 1, AWQ_ORDER).to(wide).t() for name in ("qweight", "qzeros")
    )
    values = _by_group(q, zero, None, of, torch.Tensor.sub_)
    return _by_group(values, t["scales"][:, rows].to(wide).t(), None, of, torch.Tensor.mul_)


def nvfp4(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """NVFP4: 4-bit floats with an fp8 scale for 16 of a row, and one for the tensor: a divisor in
    compressed-tensors, a factor in ModelOpt.

    weight_packed        uint8[O K/2], `weight` in ModelOpt
    weight_scale         fp8[O K/16]
    weight_global_scale  fp32[1], or `weight_scale_2`
    """
    if "weight_scale_2" in t:
        whole = t["weight_scale_2"].to(wide)
    else:
        whole = 1 / t["weight_global_scale"].to(wide)
    packed = t["weight"] if "weight" in t else t["weight_packed"]
    return _by_group(
        _fp4(packed[rows], wide),
        t["weight_scale"][rows].to(wide) * whole,
        None,
        of,
        torch.Tensor.mul_,
    )


def mxfp4(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """MXFP4: 4-bit floats with a power of two for 32 of a row.

    weight_packed  uint8[O K/2]
    weight_scale   uint8[O K/32], exponents with a bias of 127
    """
    return _by_group(
        _fp4(t["weight_packed"][rows], wide),
        exponents(t["weight_scale"][rows], wide),
        None,
        of,
        torch.Tensor.mul_,
    )


def ggml(t: Tensors, rows: slice, wide: torch.dtype, of: Layout) -> Tensor:
    """The blocks of a GGUF file, uint8[O bytes] under the name of their kind."""
    return decoded(of.main[0], t[of.main[0]][rows], wide)


def exponents(scale: Tensor, wide: torch.dtype) -> Tensor:
    """ue8m0 bytes as powers of two; 255 is NaN."""
    if scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    powers = torch.ldexp(torch.ones_like(scale, dtype=wide), scale.int() - 127)
    return powers.masked_fill_(scale == 255, torch.nan)


def _fp4(packed: Tensor, wide: torch.dtype) -> Tensor:
    """Numbers of 4 bits: sign, exponent, exponent, mantissa."""
    magnitudes = torch.tensor(
        (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=wide, device=packed.device
    )
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    numbers: Tensor = torch.cat((magnitudes, -magnitudes))[both]
    return numbers


def unpacked(packed: Tensor, bits: int, dim: int, order: Sequence[int] = range(8)) -> Tensor:
    """The numbers of 32-bit words along `dim`, as int32."""
    shifts = torch.tensor(
        [bits * at for at in order[: 32 // bits]], device=packed.device, dtype=torch.int32
    )
    if dim == 0:
        spread = packed[:, None, :] >> shifts[:, None]
    else:
        spread = packed[..., None] >> shifts
    numbers: Tensor = (spread & (2**bits - 1)).flatten(dim, dim + 1)
    return numbers


def _by_group(
    values: Tensor, own: Tensor, of_column: Tensor | None, of: Layout, apply: InPlace
) -> Tensor:
    """Applies `own` [rows G], in place, to values [rows K] of its group's columns."""
    size = of.block[1]
    if of_column is not None:
        # in the order of memory, which is that of columns in GPTQ's files
        by_column = own.stride(0) == 1
        apply(
            values,
            own.t().index_select(0, of_column).t() if by_column else own.index_select(1, of_column),
        )
    elif values.shape[1] % size == 0:
        apply(values.unflatten(1, (-1, size)), own[..., None])
    else:
        apply(values, own.repeat_interleave(size, 1)[:, : values.shape[1]])
    return values


def _each(
    values: Tensor, own: Tensor, rows: slice, wide: torch.dtype, of: Layout, apply: InPlace
) -> Tensor:
    """The same for `own` [O/block K/block]."""
    height = of.block[0]
    first = rows.start // height
    own = own[first : -(-rows.stop // height)]
    own = exponents(own, wide) if of.powers else own.to(wide)
    whole = values.shape[0] // height
    if own.shape[1] == 1 and height == 1:
        return apply(values, own)
    if own.shape[1] > 1:
        own = own.repeat_interleave(of.block[1], 1)[:, : values.shape[1]]
    if whole:
        apply(values[: whole * height].unflatten(0, (whole, height)), own[:whole, None])
    if whole * height < values.shape[0]:
        apply(values[whole * height :], own[whole:])
    return values
