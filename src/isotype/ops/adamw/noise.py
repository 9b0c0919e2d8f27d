"""Draws the random bits with which AdamW rounds bf16 tensors stochastically, and rounds with them.

The C++ kernel, the Triton kernel and plain PyTorch draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_32_BITS = (1 << 32) - 1  # masks for unsigned numbers
_64_BITS = (1 << 64) - 1


def noise_keys(seed: int) -> tuple[int, int, int]:
    """Returns three 32-bit numbers. Each of them depends on every bit of the seed.

    Source: SplitMix64, Steele et al. 2014, "Fast splittable pseudorandom number generators".
    """
    keys = []
    state = seed & _64_BITS
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _64_BITS
        value = state
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _64_BITS
        value ^= value >> 31
        keys += [value & _32_BITS, value >> 32]
    return keys[0], keys[1], keys[2]


def _mix(x_int32: Tensor) -> Tensor:
    """Applies a permutation of 32-bit numbers in which each output bit depends on all input bits.

    Source: the constants are from the hash function lowbias32 (C. Wellons 2018, "Prospecting for
    hash functions").
    """
    x_int32 = (x_int32 ^ (x_int32 >> 16 & 0xFFFF)) * 0x7FEB352D
    x_int32 = (x_int32 ^ (x_int32 >> 15 & 0x1FFFF)) * _signed(0x846CA68B)
    return x_int32 ^ (x_int32 >> 16 & 0xFFFF)


def _signed(bits: int) -> int:
    """Returns the int32 number that has these 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


def draw_noise_bits(
    seed: int, first_index: int, count: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 16 random bits for the weight, for the mean and for the square of each of `count`
    elements from `first_index` on, as int32[count].

    The bits depend only on the seed and on the index of the element. So processes that hold parts
    of one tensor draw the same bits as a single process that holds all of it. The C++, Triton and
    PyTorch implementations draw the same bits. The bits repeat after 2^32 elements.
    """
    index_key, low_key, high_key = (_signed(key) for key in noise_keys(seed))
    index = torch.arange(first_index, first_index + count, device=device)
    hashed = _mix(index.to(torch.int32) + index_key)
    low = _mix(hashed ^ low_key)
    high = _mix(hashed ^ high_key)
    return low & 0xFFFF, low >> 16 & 0xFFFF, high & 0xFFFF


def stochastic_round_(target_bf16: Tensor, value_fp32: Tensor, noise: Tensor) -> None:
    """Rounds fp32 values to bf16 and writes them to the target. Each value is rounded up or down at
    random. The nearer number is more probable, so that the expected value is exact.

    16 random bits are added to the 16 bits that bf16 drops. If this addition carries into the upper
    16 bits, the value is rounded up. Values that bf16 represents exactly, and infinities, do not
    change.

    noise  int32 [*n]  16 random bits for each element, from `draw_noise_bits`
    """
    bits = value_fp32.view(torch.int32) + noise
    bits &= -65536
    rounded = bits.view(torch.float32)
    target_bf16.copy_(torch.where(value_fp32.isfinite(), rounded, value_fp32))
