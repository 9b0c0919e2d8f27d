"""An adapter inside the product's K dimension: [x | x Aᵀ] @ [W | s B]ᵀ is x Wᵀ + s (x Aᵀ) Bᵀ in one product, summed in fp32, rounded once.

It saves a pass over the output, and costs a copy of x beside its product with A, and R more columns to sum over. Bytes and FLOPs
decide for each shape (`pays`): yes for a 4-bit layer's gate and up, whose outputs are 3.5 times as wide as the x they share; no for a
projection no wider than its input, nor for a dense weight, which would be copied too. There the adapter's product comes first, and the
large one is summed onto it (`linear.adapted_product`).

Backward has the same form, d[x | x Aᵀ] = dy [W | s B], and is not computed so: R more columns of the result are one more column of tiles,
which is 6% of a product of 4,096 columns, more than the pass over dy that they save.

T tokens, K in features, O out features of a projection, R ranks of all projections together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..environment.planned import stands_for
from ..ops.backend import fused_runs
from .narrow import narrow
from .quantised import widened_beside

# FLOPs in the time of a byte: of dense bf16 and HBM as published, A100 153, H100 SXM 295, H200 206, B200 281
RIDGE = 200
# a product sums K in steps of so many columns, whether filled or not
STEP = 64
# row strides of a multiple of 16 bytes
ALIGNED = 8


def tail(ranks: int) -> int:
    """Columns beside K."""
    return -(-ranks // ALIGNED) * ALIGNED


def pays(tokens: int, features: int, outs: Sequence[int], ranks: int, *, copies_weight: bool) -> bool:
    """Whether the copy of x and the columns take less time than writing every adapter's share, in bytes of 2-byte elements."""
    wide = sum(outs)
    inside = 4 * tokens * features + 2 * tokens * wide * (-(-ranks // STEP) * STEP) / RIDGE
    return inside + (4 * features * wide if copies_weight else 0) < 2 * tokens * wide


def before_or_inside(x_TK: Tensor) -> bool:
    """Whether adapters of x come before the large product or inside it, not after it: on a GPU, for more than a generated token's row,
    which has a product of its own over the packed weight."""
    gpu = stands_for(x_TK.device) != "cpu" and x_TK.shape[0] > 1
    return gpu and not torch.compiler.is_compiling()


def wanted(x_TK: Tensor, outs: Sequence[int], ranks: Sequence[int], states: Sequence[Any]) -> bool:
    """Whether the projections of x, each with an adapter of `ranks` and a 4-bit weight's state or None, are computed so."""
    if not before_or_inside(x_TK) or x_TK.element_size() != 2 or not all(ranks):
        return False
    # widened anyway, and into a buffer with room beside it by the op's own kernel alone
    copies = not fused_runs(x_TK) or any(state is None for state in states)
    return pays(x_TK.shape[0], x_TK.shape[1], outs, sum(ranks), copies_weight=copies)


def weights(
    packed: Sequence[Tensor], states: Sequence[Any], bs: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype
) -> list[Tensor]:
    """[W | s B] of each projection in `dtype`, zero where another's ranks are: dtype[O, K + tail].

    bs  any float [O r]; rounded to `dtype`, scaled in fp32 and rounded again, which a scale that is a power of two does not need
    """
    columns, start, made = tail(sum(b.shape[1] for b in bs)), 0, []
    for weight, state, b, scale in zip(packed, states, bs, scales):
        both = widened_beside(weight, state, dtype, columns)
        scaled = (narrow(b, dtype).float() * scale).to(dtype)
        both[:, -columns:] = F.pad(scaled, (start, columns - start - b.shape[1]))
        made.append(both)
        start += b.shape[1]
    return made


def inputs(x_TK: Tensor, xa_TR: Tensor) -> Tensor:
    """[x | x Aᵀ], with zeros up to `tail`."""
    spare = tail(xa_TR.shape[1]) - xa_TR.shape[1]
    parts = [x_TK, xa_TR] if not spare else [x_TK, xa_TR, xa_TR.new_zeros(xa_TR.shape[0], spare)]
    return torch.cat(parts, 1)
