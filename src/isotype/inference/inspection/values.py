"""Measures the range of the values of a tensor in a file. It counts the zeros and the values that
are not finite, and measures how large the values are and what a cast to fp16 would lose. A tensor
is read in parts, so that the memory that is needed does not depend on its size. Imports no torch,
except for the blocks of GGUF files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from .checkpoint import StoredTensor

_CHUNK_BYTES = 4 << 20  # bytes of a tensor that are read at once
_Array = np.ndarray[Any, Any]
# values of this size and larger become infinite in fp16. The largest fp16 number is 65504, and
# 65520 is halfway to the number that would follow it, 65536
_FP16_OVERFLOW = 65520.0
_FP16_SMALLEST_NORMAL = 2.0**-14  # fp16 stores smaller values with fewer bits
_FP16_ZERO = 2.0**-25  # values of this size and smaller become zero in fp16
# the bits of an fp32 number that bf16 does not have; they are zero if the number is a bf16 number
_BITS_BEYOND_BF16 = np.uint32(0xFFFF)


@dataclass(frozen=True)
class ValueRange:
    """Summarises the values of one tensor, or of several tensors.

    largest      the largest absolute value that is finite
    overflow     values that become infinite in fp16
    subnormal    values that lose bits in fp16, because they are below its normal range
    vanishing    values that become zero in fp16
    only_bf16    whether every value is a number that bf16 can store; False if there is a NaN
    only_fp16    whether every value is a number that fp16 can store; False if there is a NaN
    """

    count: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    largest: float = 0.0
    overflow: int = 0
    subnormal: int = 0
    vanishing: int = 0
    only_bf16: bool = True
    only_fp16: bool = True

    @property
    def is_all_zero(self) -> bool:
        return self.count > 0 and self.zero == self.count

    def __add__(self, other: ValueRange) -> ValueRange:
        return ValueRange(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
            zero=self.zero + other.zero,
            largest=max(self.largest, other.largest),
            overflow=self.overflow + other.overflow,
            subnormal=self.subnormal + other.subnormal,
            vanishing=self.vanishing + other.vanishing,
            only_bf16=self.only_bf16 and other.only_bf16,
            only_fp16=self.only_fp16 and other.only_fp16,
        )


def measure_values(tensor: StoredTensor) -> ValueRange | None:
    """Returns the range of a tensor's values. Returns None for integers, and for GGUF blocks of a
    kind that Isotype cannot decode. For fp8 numbers, the scales, which are other tensors of the
    file, are not applied.

    Raises  OSError if the file cannot be read
    """
    if tensor.dtype in _CODE_TABLES:
        return _measure_codes(tensor)
    total = ValueRange()
    values = read_values(tensor)
    if values is None:
        return None
    for chunk in values:
        total = total + _measure_chunk(chunk)
    return total


def read_values(tensor: StoredTensor) -> Iterator[_Array] | None:
    """Returns the values of a tensor in parts, as fp32 or fp64. Returns None for integers, and for
    GGUF blocks of a kind that Isotype cannot decode.
    """
    if tensor.dtype in _CODE_TABLES or tensor.dtype in _FLOATS:
        return _read_floats(tensor)
    if tensor.row_bytes:
        return _read_blocks(tensor)
    return None


# dtypes that numpy reads directly. The names in upper case are those of GGUF files
_FLOATS = {"fp32": np.float32, "fp64": np.float64, "F32": np.float32, "F64": np.float64}


def _read_floats(tensor: StoredTensor) -> Iterator[_Array]:
    table = _CODE_TABLES.get(tensor.dtype)
    code_type = _FLOATS.get(tensor.dtype) if table is None else _code_type(table)
    for chunk in _read_chunks(tensor, np.dtype(code_type)):
        yield chunk if table is None else table[chunk]


def _read_chunks(tensor: StoredTensor, dtype: np.dtype[Any]) -> Iterator[_Array]:
    """Yields the numbers of a tensor as the file stores them."""
    remaining = tensor.size_bytes // dtype.itemsize
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        while remaining:
            chunk = _read_numbers(file, dtype, min(remaining, _CHUNK_BYTES // dtype.itemsize))
            remaining -= len(chunk)
            yield chunk


def _read_numbers(file: IO[bytes], dtype: np.dtype[Any], count: int) -> _Array:
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise OSError("the file ends in a tensor")
    return np.frombuffer(content, dtype)


def _read_blocks(tensor: StoredTensor) -> Iterator[_Array]:
    import torch

    from ...ops.packed.ggml import BLOCKS, decode_blocks

    assert tensor.dtype in BLOCKS
    # decoded to fp32, 4 bits take 8 times as much memory
    rows = max(1, _CHUNK_BYTES // (8 * tensor.row_bytes))
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        remaining = tensor.size_bytes // tensor.row_bytes
        while remaining:
            count = min(rows, remaining)
            content = bytearray(file.read(count * tensor.row_bytes))
            packed = torch.frombuffer(content, dtype=torch.uint8).view(count, tensor.row_bytes)
            remaining -= count
            values: _Array = decode_blocks(tensor.dtype, packed, torch.float32).numpy()
            yield values


def _measure_chunk(values: _Array) -> ValueRange:
    """Measures fp32 or fp64 values."""
    magnitudes = np.abs(values)
    is_finite = np.isfinite(magnitudes)
    nan = int(np.isnan(magnitudes).sum())
    not_finite = values.size - int(is_finite.sum())
    if not_finite:
        magnitudes = magnitudes[is_finite]
    zero = int((magnitudes == 0).sum())
    vanishing = int((magnitudes <= _FP16_ZERO).sum()) - zero
    small = int((magnitudes < _FP16_SMALLEST_NORMAL).sum())
    return ValueRange(
        count=values.size,
        nan=nan,
        infinite=not_finite - nan,
        zero=zero,
        largest=float(magnitudes.max(initial=0.0)),
        overflow=int((magnitudes >= _FP16_OVERFLOW).sum()),
        subnormal=small - zero - vanishing,
        vanishing=vanishing,
        only_bf16=_are_all_bf16(values),
        only_fp16=_are_all_fp16(values),
    )


def _are_all_bf16(values: _Array) -> bool:
    """Whether bf16 can store every value. Returns False if there is a NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
    return bool((narrow == values).all() and not (narrow.view(np.uint32) & _BITS_BEYOND_BF16).any())


def _are_all_fp16(values: _Array) -> bool:
    """Whether fp16 can store every value. Returns False if there is a NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float16)
    return bool((narrow == values).all())


def _measure_codes(tensor: StoredTensor) -> ValueRange:
    """Measures a tensor of 8-bit or 16-bit values. It counts how often each of the 256 or 65,536
    possible bit patterns (codes) occurs, and then converts only these patterns to numbers. This is
    several times as fast as converting every value.
    """
    table = _CODE_TABLES[tensor.dtype]
    counts = np.zeros(len(table), dtype=np.int64)
    for chunk in _read_chunks(tensor, _code_type(table)):
        counts += np.bincount(chunk, minlength=len(table))
    values = table[counts > 0]
    counts = counts[counts > 0]
    magnitudes = np.abs(values)
    is_finite = np.isfinite(magnitudes)
    is_zero = magnitudes == 0
    is_vanishing = (magnitudes <= _FP16_ZERO) & ~is_zero
    is_small = magnitudes < _FP16_SMALLEST_NORMAL
    return ValueRange(
        count=int(counts.sum()),
        nan=int(counts[np.isnan(magnitudes)].sum()),
        infinite=int(counts[np.isinf(magnitudes)].sum()),
        zero=int(counts[is_zero].sum()),
        largest=float(magnitudes[is_finite].max(initial=0.0)),
        overflow=int(counts[(magnitudes >= _FP16_OVERFLOW) & is_finite].sum()),
        subnormal=int(counts[is_small & ~is_zero & ~is_vanishing].sum()),
        vanishing=int(counts[is_vanishing].sum()),
        only_bf16=_are_all_bf16(values),
        only_fp16=_are_all_fp16(values),
    )


def _code_type(table: _Array) -> np.dtype[Any]:
    """Returns the dtype in which numpy reads the bit patterns of a table."""
    return np.dtype(np.uint16 if len(table) > 256 else np.uint8)


def _build_code_tables() -> dict[str, _Array]:
    """Returns a table for each dtype of 8 or 16 bits, with the fp32 value of every possible bit
    pattern. A bit pattern is called a code. The names in upper case are those of GGUF files.
    """
    codes = np.arange(1 << 16, dtype=np.uint16)
    byte_codes = np.arange(1 << 8, dtype=np.uint16)
    bf16 = (codes.astype(np.uint32) << 16).view(np.float32)
    fp16 = codes.view(np.float16).astype(np.float32)
    # e5m2 is the upper byte of an fp16 number. e4m3 has the exponent bias 7 and no infinity
    fp8_e5m2 = (byte_codes << 8).view(np.float16).astype(np.float32)
    exponent = (byte_codes >> 3 & 15).astype(np.int32)
    fraction = (byte_codes & 7).astype(np.float32)
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    fp8_e4m3 = np.where(exponent == 0, fraction * 2.0**-9, normal).astype(np.float32)
    fp8_e4m3[byte_codes & 0x7F == 0x7F] = np.nan
    fp8_e4m3[byte_codes >= 0x80] *= -1
    powers = np.ldexp(np.float32(1), byte_codes[:-1].astype(np.int32) - 127)
    fp8_e8m0 = np.append(powers, np.float32(np.nan)).astype(np.float32)
    return {
        "bf16": bf16,
        "BF16": bf16,
        "fp16": fp16,
        "F16": fp16,
        "fp8_e4m3": fp8_e4m3,
        "fp8_e5m2": fp8_e5m2,
        "fp8_e8m0": fp8_e8m0,
    }


_CODE_TABLES = _build_code_tables()
