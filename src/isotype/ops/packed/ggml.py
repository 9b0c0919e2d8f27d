"""Decodes the blocks of GGUF files. The decoders implement the definition of the format. A block
stores 32 or 256 numbers of a row and their scales in 18 to 210 bytes.

The order of operations is the same as in ggml's reference, so that fp32 results are bit-identical.

B blocks. A block's scale `d` and its minimum are fp16. They are multiplied by integers of 4, 6 or 8
bits, one for each group of the block.

Source: llama.cpp, `ggml-quants.c` and `ggml-common.h`; the tests compare the results with the
package gguf 0.19 (`quants.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# kind -> (numbers per block, bytes per block, byte offsets of its fp16 scales)
BLOCKS = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)), "Q8_0": (32, 34, (0,)),
    "IQ4_NL": (32, 18, (0,)), "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)),
}  # fmt: skip
# the values of the 16 numbers of IQ4_NL
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_blocks(kind: str, packed: Tensor, wide: torch.dtype) -> Tensor:
    """Decodes whole blocks.

    packed  uint8[rows bytes]
    ->      wide[rows K]
    """
    numbers, size, scale_offsets = BLOCKS[kind]
    blocks = packed.reshape(-1, size)
    d = [_read_fp16(blocks, offset).to(wide) for offset in scale_offsets]
    values = (
        _K_DECODERS[kind](blocks, d, wide)
        if kind in _K_DECODERS
        else _decode_32(kind, blocks, d, wide)
    )
    return values.reshape(packed.shape[0], packed.shape[1] // size * numbers)


def find_non_finite(kind: str, packed: Tensor) -> Tensor:
    """Returns bool[rows blocks], true where a scale is infinite or NaN."""
    _, size, scale_offsets = BLOCKS[kind]
    blocks = packed.reshape(-1, size)
    is_bad = torch.stack([~_read_fp16(blocks, offset).isfinite() for offset in scale_offsets]).any(
        0
    )
    return is_bad.view(packed.shape[0], -1)


def _read_fp16(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def _extract_bit_fields(packed: Tensor, shifts: Sequence[int], width: int, mask: int) -> Tensor:
    """Extracts numbers of a few bits from bytes. For each group of `width` consecutive bytes and
    each shift, the result contains the bytes shifted to the right by this number of bits and
    masked. The result is uint8[B len(shifts) * bytes].
    """
    shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None]
    return ((packed.reshape(packed.shape[0], -1, 1, width) >> shift) & mask).reshape(
        packed.shape[0], -1
    )


def _decode_32(kind: str, blocks: Tensor, d: list[Tensor], wide: torch.dtype) -> Tensor:
    """Decodes blocks of 32 numbers with a scale, and with a minimum in Q4_1 and Q5_1. Q5 stores the
    fifth bits in a separate word.
    """
    if kind == "Q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8).to(wide) * d[0]
    q = _extract_bit_fields(blocks[:, -16:], (0, 4), 16, 15)
    if kind == "IQ4_NL":
        return d[0] * torch.tensor(_IQ4, dtype=wide, device=q.device)[q.int()]
    zero = 8
    if kind.startswith("Q5"):
        bits = blocks[:, -20:-16, None] >> torch.arange(8, dtype=torch.uint8, device=q.device)
        q = q | (bits & 1).reshape(-1, 32) << 4
        zero = 16
    if len(d) == 2:
        return d[0] * q.to(wide) + d[1]
    return d[0] * (q.to(wide) - zero)


def _decode_q2_k(blocks: Tensor, d: list[Tensor], wide: torch.dtype) -> Tensor:
    scales = blocks[:, :16]
    q = _extract_bit_fields(blocks[:, 16:80], (0, 2, 4, 6), 32, 3)
    return _scale_groups(d[0] * (scales & 15).to(wide), q.to(wide), d[1] * (scales >> 4).to(wide))


def _decode_q3_k(blocks: Tensor, d: list[Tensor], wide: torch.dtype) -> Tensor:
    low = _extract_bit_fields(blocks[:, 96:104], (0, 4), 8, 15)
    high = _extract_bit_fields(blocks[:, 104:108], (0, 2, 4, 6), 4, 3)
    q = _extract_bit_fields(blocks[:, 32:96], (0, 2, 4, 6), 32, 3).to(wide)
    # 4 is subtracted where the bit is not set
    q -= (1 - _extract_bit_fields(blocks[:, :32], range(8), 32, 1)).to(wide) * 4
    return _scale_groups(d[0] * ((low | high << 4).to(wide) - 32), q)


def _decode_q4_q5_k(blocks: Tensor, d: list[Tensor], wide: torch.dtype) -> Tensor:
    """Decodes Q4_K and Q5_K. Each block has eight scales and eight minima of 6 bits, which are
    stored in 12 bytes. The low 6 bits of the first eight bytes are the first four scales and the
    first four minima. The last four scales and minima are split: their high 2 bits are the high
    bits of the first eight bytes, and their low 4 bits are in the last four bytes.
    """
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    high_halves = blocks[:, 12:16]
    scale = torch.cat((first & 63, (high_halves & 15) | (first >> 2) & 48), 1)
    minimum = torch.cat((second & 63, (high_halves >> 4) | (second >> 2) & 48), 1)
    q = _extract_bit_fields(blocks[:, -128:], (0, 4), 32, 15)
    if blocks.shape[1] == BLOCKS["Q5_K"][1]:
        q = q | _extract_bit_fields(blocks[:, 16:48], range(8), 32, 1) << 4
    return _scale_groups(d[0] * scale.to(wide), q.to(wide), d[1] * minimum.to(wide))


def _decode_q6_k(blocks: Tensor, d: list[Tensor], wide: torch.dtype) -> Tensor:
    q = (
        _extract_bit_fields(blocks[:, :128], (0, 4), 64, 15)
        | _extract_bit_fields(blocks[:, 128:192], (0, 2, 4, 6), 32, 3) << 4
    )
    return _scale_groups(
        d[0] * blocks[:, 192:208].contiguous().view(torch.int8).to(wide), q.to(wide) - 32
    )


def _scale_groups(scale: Tensor, q: Tensor, minimum: Tensor | None = None) -> Tensor:
    """Computes scale [B groups] * q [B numbers] - minimum [B groups]."""
    values: Tensor = q.unflatten(1, (scale.shape[1], -1)).mul_(scale[..., None])
    return values if minimum is None else values.sub_(minimum[..., None])


# kind of blocks with 256 values -> the function that decodes it
_K_DECODERS = {
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_q5_k,
    "Q5_K": _decode_q4_q5_k,
    "Q6_K": _decode_q6_k,
}
