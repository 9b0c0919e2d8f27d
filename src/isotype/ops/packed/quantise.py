"""Rounds a weight to a format that is served. The bytes are exactly those that `isotype export`
writes, so that a model can be trained with the weights of its file.

The quantisers of GGUF types repeat the arithmetic of the package gguf, operation by operation. The
tests compare the bytes.

B blocks of 32 numbers.

Source: gguf 0.19 (`quants.py`), which follows llama.cpp's `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .formats import Layout
from .ggml import BLOCKS
from .state import PackedState


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
    """fp32[B 1] -> uint8[B 2], the bytes of an fp16 number."""
    return d.half().view(torch.uint8)


def _signed_largest(blocks: Tensor) -> Tensor:
    """Returns the first value of each block with the largest magnitude, with its sign, as [B 1].

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
    """uint8[B 32] of 4 bits -> uint8[B 16]. The first 16 numbers are in the low half of the bytes."""
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


_BLOCK_QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _quantise_q4_0,
    "Q5_0": _quantise_q5_0,
    "Q8_0": _quantise_q8_0,
}
