"""What a LoRA call computes in: decided once, from the tensors and from autocast, before anything is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dtypes import name
from ..errors import DtypeError
from ..ops.autocast import autocast_dtype


class LoraDtypes(NamedTuple):
    """compute  both operands of the base product
    out      what the caller gets: always PEFT's
    wide     whether the adapter branch is computed in fp32, row block by row block, instead of in `compute`
    """

    compute: torch.dtype
    out: torch.dtype
    wide: bool


def decide(
    x: Tensor,
    weight_dtype: torch.dtype,
    adapter_dtype: torch.dtype | None,
    *,
    quantised: bool,
    branch_fp32: bool = False,
    x_dtype: torch.dtype | None = None,
) -> LoraDtypes:
    """The dtypes of one call.

    weight_dtype   a dense weight's own dtype; for a quantised weight the layer's compute dtype
    adapter_dtype  None without an adapter
    x_dtype        decides as if x had this dtype, for an input that is not computed yet
    branch_fp32    asks for the adapter branch in fp32 wherever `compute` is narrower

    A dense product follows autocast; a quantised one computes in its layer's dtype and answers in its input's, as bitsandbytes does.
    PEFT's adapter branch runs in autocast's dtype, or else in the adapter's. Where that is not `compute`, the branch is computed in fp32,
    which loses nothing.

    Raises  DtypeError DT001 where autocast is off and a dense weight and its input differ: plain `nn.Linear` refuses those too
    """
    cast, x_dtype = autocast_dtype(x), x_dtype or x.dtype
    if quantised:
        compute, out = weight_dtype, x_dtype
    elif cast is not None and torch.float64 not in (x_dtype, weight_dtype):
        compute = out = cast
    elif x_dtype == weight_dtype:
        compute = out = x_dtype
    else:
        raise DtypeError(
            f"LoRA linear got an input in {name(x_dtype)} and a weight in {name(weight_dtype)} with autocast off, declared one dtype",
            code="DT001",
            fix=f"x.to({weight_dtype}), or run under torch.autocast({x.device.type!r}, dtype=...)",
        )
    peft_branch = adapter_dtype if cast is None else cast
    narrow = compute in (torch.bfloat16, torch.float16)
    return LoraDtypes(compute, out, adapter_dtype is not None and narrow and (branch_fp32 or peft_branch != compute))
