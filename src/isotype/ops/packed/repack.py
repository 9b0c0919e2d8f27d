"""GPTQ's and AWQ's integers put in order along a row, once, when a layer is loaded: in the bytes that the file has, for the one kernel.

Their words run down the columns of the weight, so that a row cannot be widened without the words of seven others. Values stay the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formats import AWQ_ORDER, Layout, Tensors, unpacked
from .state import PackedState, piece_of


def in_rows(words: Tensor, state: PackedState) -> tuple[Tensor, PackedState]:
    """The main tensor and the state as `formats.packed_rows` takes them; as they are for other formats, and for columns in an order of
    their own (act-order).

    words  int32, `qweight`
    ->     int32[O ceil(K bits / 32)], zero points int16[O G] less half of their range
    """
    of, t = state.layout, state.tensors
    if of.format not in ("gptq", "awq") or "g_idx" in t:
        return words, state
    (rows, columns), per_word = of.shape, 32 // of.bits
    made = words.new_empty(rows, -(-columns // per_word))
    for start in range(0, 0 if words.is_meta else rows, step := max(1, piece_of(words) // (8 * columns)) * 8):
        piece = slice(start, min(start + step, rows))
        made[piece] = _joined(_numbers({"qweight": words}, "qweight", piece, of), of.bits)
    zero = _numbers(t, "qzeros", slice(0, rows), of) + of.first_zero - 2 ** (of.bits - 1)
    own = {"weight_scale": t["scales"].t().contiguous(), "weight_zero_point": zero.to(torch.int16).contiguous()}
    layout = Layout("packed_rows", of.shape, ("weight_packed", torch.int32, tuple(made.shape)), of.block, of.bits)
    return made, PackedState(layout, state.word, own)


def _numbers(t: Tensors, name: str, rows: slice, of: Layout) -> Tensor:
    """int32[rows K], or [rows G] of the zero points."""
    numbers: Tensor
    if name == "qweight" and of.format == "gptq":
        numbers = unpacked(t[name][:, rows], of.bits, 0).t()
    else:
        words = t[name][:, rows.start * of.bits // 32 : -(-rows.stop * of.bits // 32)]
        numbers = unpacked(words, of.bits, 1, AWQ_ORDER if of.format == "awq" else range(8)).t()[: rows.stop - rows.start]
    return numbers


def _joined(numbers: Tensor, bits: int) -> Tensor:
    """Words of 32 bits along a row, the lowest bits first; the last is filled with zeros."""
    per_word = 32 // bits
    whole: Tensor = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word)).long().unflatten(1, (-1, per_word))
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    words: Tensor = (whole << shifts).sum(-1).to(torch.int32)
    return words
