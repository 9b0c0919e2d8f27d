"""The expression that gave a tensor its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .weight_origin import WeightOrigin


@dataclass(frozen=True, slots=True)
class Promotion:
    """An operation of two tensors whose result has the wider of their dtypes.

    operation  the name of the operation in autograd's graph, such as `Add`
    operand    the source code of the operand with the wider dtype
    location   the file and line of the operation
    """

    operation: str
    operand: str
    location: str


@dataclass(frozen=True, slots=True)
class Source:
    """A call that made one of two operands of different dtypes.

    text      the source code of the call
    location  the file and line of the call
    dtype     the dtype of the operand
    """

    text: str
    location: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Producer:
    """The expression that gave a tensor its dtype.

    kind      cast, module, creation, parameter, attribute, data, autocast, call, copy (of a weight
              whose dtype a later call changed) or unknown
    text      the source code of the expression
    location  the file and line of the expression
    function  the function that contains the line
    path      the module, parameter or buffer that the expression names; "" if it names none
    module    the module that computed the tensor, for the kind `module`
    passed    the expression that the innermost frame of the user's code passes to another function
              as this tensor; "" if there is none
    passed_at the file and line of that expression
    is_proven whether the source code or a stored value shows that the expression gives the dtype
    hook      the hook that contains the expression; "" if no hook does
    promotions  the operations through which the dtype reached the tensor
    reason    why a call returns this dtype, as a part of a sentence; "" for most kinds
    sources   the calls that made the operands of an operation of fp16 with bf16
    weight_origin  the call that gave a weight the dtype that the tensor took over, for `parameter`
    stored    the expression that the user's code stores in an object of a library, and its file and
    stored_at line; "" if there is none
    """

    kind: str
    text: str
    location: str
    function: str
    path: str = ""
    module: nn.Module | None = None
    passed: str = ""
    passed_at: str = ""
    is_proven: bool = False
    hook: str = ""
    promotions: tuple[Promotion, ...] = ()
    reason: str = ""
    sources: tuple[Source, ...] = ()
    weight_origin: WeightOrigin | None = None
    stored: str = ""
    stored_at: str = ""

    def describe(self, dtype_name: str) -> str:
        """Returns the expression that gave a tensor its dtype as a part of a sentence, if it is
        proven, and otherwise "".
        """
        place = f"`{self.text}` ({self.location})"
        if not self.is_proven:
            return ""
        if self.kind == "copy":
            return f"it keeps {dtype_name}, {self.reason} ({self.location})"
        if self.reason:
            return f"{place} returns {dtype_name}, because {self.reason}"
        if self.kind == "module":
            return f"{place} returns {dtype_name}, as the weights of {self.path} are"
        if self.kind == "cast":
            return f"{place} casts it to {dtype_name}"
        if self.kind == "creation":
            return f"{place} creates it in {dtype_name}"
        return f"{place} is {dtype_name}"
