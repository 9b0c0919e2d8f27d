"""Rounds a weight to a format in which models are exported and served. The bytes are exactly those
that `isotype export` writes. So a model can be trained with the same weights that its exported file
will contain.

The quantisers of GGUF types do the same arithmetic operations in the same order as the Python
package gguf. The tests check that both write the same bytes.

B is the number of blocks. Each block has 32 numbers.

Source: gguf 0.19 (`quants.py`), which follows llama.cpp's `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .formats import Layout, decode_exponents
from .ggml import BLOCKS
from .state import PackedState, pack_words


def pack_blocks(weight: Tensor, kind: str) -> tuple[Tensor, PackedState]:
    """Packs a weight into blocks of a GGUF type. Returns (packed weight, state).

    weight  fp32[O K]
    kind    Q8_0, Q5_0 or Q4_0; K is a multiple of 32
    ->      uint8[O bytes]
    """
    rows, columns = weight.shape
    numbers, size, _ = BLOCKS[kind]
    packed = _BLOCK_QUANTISERS[kind](weight.reshape(-1, numbers))
    packed = packed.reshape(rows, columns // numbers * size)
    layout = Layout("ggml", (rows, columns), (kind, torch.uint8, tuple(packed.shape)), (1, numbers))
    return packed, PackedState(layout, "gguf", {})


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _scale_bytes(d: Tensor) -> Tensor:
    """Rounds scales, fp32[B 1], to fp16 and returns their bytes, uint8[B 2]."""
    return d.half().view(torch.uint8)


def _signed_largest(blocks: Tensor) -> Tensor:
    """For each block, returns the value with the largest magnitude, including its sign, as [B 1].
    If several values have this magnitude, the first of them is returned.

    On a CPU argmax takes two thirds of the time of a quantiser. So it is called only for blocks in
    which the largest and the smallest value have the same magnitude.
    """
    if type(blocks) is not Tensor or not blocks.is_cpu:
        return _first_largest(blocks)
    largest = blocks.amax(-1, keepdim=True)
    smallest = blocks.amin(-1, keepdim=True)
    signed = torch.where(largest > -smallest, largest, smallest)
    is_tie = (largest == -smallest)[:, 0]
    if is_tie.any():
        signed[is_tie] = _first_largest(blocks[is_tie])
    return signed


def _first_largest(blocks: Tensor) -> Tensor:
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))


def _join_halves(numbers: Tensor) -> Tensor:
    """Packs blocks of 32 4-bit numbers, uint8[B 32], into uint8[B 16]. The first 16 numbers are in
    the low half of the bytes.
    """
    return numbers[:, :16] | (numbers[:, 16:] << 4)


def _quantise_q4_0(blocks: Tensor) -> Tensor:
    d = _signed_largest(blocks) / -8
    numbers = (blocks * _inverse(d) + 8.5).trunc_().to(torch.uint8).clamp_(max=15)
    return torch.cat((_scale_bytes(d), _join_halves(numbers)), 1)


def _quantise_q5_0(blocks: Tensor) -> Tensor:
    d = _signed_largest(blocks) / -16
    numbers = (blocks * _inverse(d) + 16.5).trunc_().to(torch.uint8).clamp_(max=31)
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth_bits = ((numbers >> 4).unflatten(1, (4, 8)) << places).sum(-1, dtype=torch.uint8)
    return torch.cat((_scale_bytes(d), fifth_bits, _join_halves(numbers & 15)), 1)


def _quantise_q8_0(blocks: Tensor) -> Tensor:
    d = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(d)
    # half a step is rounded away from zero
    magnitude = scaled.abs()
    floor = magnitude.floor()
    rounded = floor + (2 * (magnitude - floor)).floor_()
    numbers = (scaled.sign() * rounded).to(torch.int8).view(torch.uint8)
    return torch.cat((_scale_bytes(d), numbers), 1)


# kind of blocks -> the function that rounds a weight to it
_BLOCK_QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _quantise_q4_0,
    "Q5_0": _quantise_q5_0,
    "Q8_0": _quantise_q8_0,
}


# --- the formats of compressed-tensors. Scales have the dtype in which the library stores them

_SCALE_DTYPE = torch.bfloat16  # of fp8, int8 and int4
_E4M3_MAX = 448.0  # the largest number of fp8 (e4m3)
_FP4_MAX = 6.0  # the largest number of fp4
NVFP4_LARGEST = _E4M3_MAX * _FP4_MAX
"""The largest magnitude of NVFP4, before it is divided by the global scale."""
_FP4_EXPONENT = 2  # of the largest number, 6
NVFP4_BLOCK = 16  # values that share a scale
MXFP4_BLOCK = 32  # values that share a scale


def pack_compressed(
    weight: Tensor, name: str, *, group: int, global_scale: Tensor | None = None
) -> tuple[Tensor, PackedState]:
    """Packs a weight in a format of compressed-tensors. Returns (packed weight, state).

    weight        fp32[O K]
    name          fp8, int8, int4, nvfp4 or mxfp4
    group         values of a row that share a scale, for int4; K is a multiple of it
    global_scale  fp32[1], the scale of the whole weight in nvfp4; None: `nvfp4_global_scale` of its
                  largest magnitude
    """
    columns = weight.shape[1]
    if name == "fp8":
        return _pack_fp8(weight)
    if name in ("int8", "int4"):
        bits = int(name.removeprefix("int"))
        size = group if bits == 4 else columns
        return _pack_integers(weight, bits, size)
    if name == "nvfp4":
        if global_scale is None:
            global_scale = nvfp4_global_scale(weight.abs().amax())
        return _pack_nvfp4(weight, global_scale.to(weight.device))
    return _pack_mxfp4(weight)


def _divide(values: Tensor, scale: Tensor) -> Tensor:
    """Returns values / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, values / scale)


def _pack_fp8(weight: Tensor) -> tuple[Tensor, PackedState]:
    shape = (weight.shape[0], weight.shape[1])
    scale = (weight.abs().amax(1, keepdim=True) / _E4M3_MAX).to(_SCALE_DTYPE)
    numbers = _divide(weight, scale.float()).clamp_(-_E4M3_MAX, _E4M3_MAX)
    layout = Layout("scaled", shape, ("weight", torch.float8_e4m3fn, shape), (1, shape[1]))
    state = PackedState(layout, "fp8", {"weight_scale": scale})
    return numbers.to(torch.float8_e4m3fn), state


def _pack_integers(weight: Tensor, bits: int, size: int) -> tuple[Tensor, PackedState]:
    """Quantises the weight to integers from -2^(bits - 1) to 2^(bits - 1) - 1 and packs them. The
    scale of a group is its largest magnitude divided by 2^(bits - 1) - 1/2.
    """
    shape = (weight.shape[0], weight.shape[1])
    half = 2 ** (bits - 1)
    groups = weight.unflatten(1, (-1, size))
    scale = (groups.abs().amax(-1) / (half - 0.5)).to(_SCALE_DTYPE)
    numbers = _divide(groups, scale.float()[..., None]).round_().clamp_(-half, half - 1)
    packed = pack_words(numbers.flatten(1).to(torch.int32) + half, bits)
    layout = Layout(
        "packed_rows",
        shape,
        ("weight_packed", torch.int32, tuple(packed.shape)),
        (1, size),
        bits,
    )
    return packed, PackedState(layout, f"int{bits}", {"weight_scale": scale})


def _fp4_codes(values: Tensor) -> Tensor:
    """Returns the codes of the nearest 4-bit floats as uint8. A value exactly between two 4-bit
    floats is rounded to the one with an even mantissa.
    """
    magnitude = values.abs()
    codes = (magnitude > 0.25).to(torch.uint8)
    codes += magnitude >= 0.75
    codes += magnitude > 1.25
    codes += magnitude >= 1.75
    codes += magnitude > 2.5
    codes += magnitude >= 3.5
    codes += magnitude > 5
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def _pack_fp4(
    blocks: Tensor, scale: Tensor, format_name: str, tensors: dict[str, Tensor]
) -> tuple[Tensor, PackedState]:
    """blocks  fp32[O G block]; scale fp32[O G]"""
    codes = _fp4_codes(_divide(blocks, scale[..., None])).flatten(1)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    shape = (blocks.shape[0], blocks.shape[1] * blocks.shape[2])
    layout = Layout(
        format_name,
        shape,
        ("weight_packed", torch.uint8, tuple(packed.shape)),
        (1, blocks.shape[2]),
    )
    return packed, PackedState(layout, format_name, tensors)


def nvfp4_global_scale(largest: Tensor) -> Tensor:
    """Returns the scale of a whole weight in nvfp4, fp32[1]. With it, the block that contains
    `largest`, the largest magnitude of the weight (fp32[]), has the largest e4m3 number as scale.
    """
    return torch.where(largest > 0, NVFP4_LARGEST / largest, 1.0).view(1)


def _pack_nvfp4(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, PackedState]:
    """Packs a weight as NVFP4. Values that are too large for the global scale are reduced to the
    largest number of the format.
    """
    blocks = weight.unflatten(1, (-1, NVFP4_BLOCK))
    scale = (blocks.abs().amax(-1) * (global_scale / _FP4_MAX)).clamp_(max=_E4M3_MAX)
    scale = scale.to(torch.float8_e4m3fn)
    tensors = {"weight_scale": scale, "weight_global_scale": global_scale.clone()}
    return _pack_fp4(blocks, scale.float() * (1 / global_scale), "nvfp4", tensors)


def _pack_mxfp4(weight: Tensor) -> tuple[Tensor, PackedState]:
    """Packs a weight as MXFP4. The exponent of a block's scale is the exponent of the largest value
    in the block minus the exponent of 6, which is the largest 4-bit float.
    """
    blocks = weight.unflatten(1, (-1, MXFP4_BLOCK))
    _, exponent = torch.frexp(blocks.abs().amax(-1))  # in 0.5 to 1 times 2^exponent
    stored = (exponent - 1 - _FP4_EXPONENT + 127).clamp_(0, 254).to(torch.uint8)
    scale = decode_exponents(stored, torch.float32)
    return _pack_fp4(blocks, scale, "mxfp4", {"weight_scale": stored})
