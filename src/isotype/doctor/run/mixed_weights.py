"""Groups the weights of a model by dtype, with the lines of the user's code that built or cast them,
for code that takes all weights of a module together and needs one dtype, such as FSDP.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...dtypes import format_dtype
from .modules import ModelNames
from .recorded_origins import list_origins
from .weight_origin import ADAPTER_FUNCTIONS, ADAPTER_KEYWORD, WeightOrigin

# messages of FSDP, of its units' checks, and of like checks of other programs
NEEDS_ONE_DTYPE = re.compile(
    r"(?i)uniform (?:\w+ ){0,3}dtype|(?:parameters|gradients|weights|tensors)\b.{0,30}same dtype"
    r"|same dtype.{0,30}\b(?:parameters|gradients|weights)"
)
_MAX_LINES = 3  # lines that a sentence names


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The weights of a model in one dtype.

    paths    the paths of the parameters
    origins  the calls that gave them this dtype, that of most elements first; empty if not known
    """

    dtype: torch.dtype
    paths: Sequence[str]
    origins: Sequence[WeightOrigin]

    @property
    def weights(self) -> str:
        rest = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{rest}"

    def describe(self) -> str:
        """Returns a part of a sentence: the weights, their dtype, and the lines that made them so."""
        name = format_dtype(self.dtype)
        if not self.origins:
            return f"{self.weights} are {name}"
        first, *others = self.origins[:_MAX_LINES]
        lines = ", ".join(f"`{origin.text}` ({origin.location})" for origin in others)
        return first.describe(self.weights, name) + (f", like {lines}" if lines else "")

    def rebuilt(self, dtype: torch.dtype) -> list[str]:
        """Returns the calls with another dtype, each with its place."""
        fixes = []
        for origin in self.origins[:_MAX_LINES]:
            text = _without_adapter_cast(origin) or origin.with_dtype(dtype)
            if not text:
                return []
            fixes.append(f"`{text}` at {origin.location}")
        return fixes


def group_weights(names: ModelNames, model: nn.Module) -> list[WeightGroup]:
    """Returns the floating-point weights of a model by dtype. The group with most elements comes
    first.
    """
    paths: dict[torch.dtype, list[str]] = {}
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            path = names.tensor_path(parameter) or "a weight"
            paths.setdefault(parameter.dtype, []).append(path)
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return [
        WeightGroup(dtype, paths[dtype], list_origins(model.modules(), dtype))
        for dtype in sorted(paths, key=lambda dtype: -sizes[dtype])
    ]


def _without_adapter_cast(origin: WeightOrigin) -> str:
    """Returns the call of PEFT that keeps adapters in the dtype of their base, or ""."""
    call = origin.call
    if call is None or ast.unparse(call.func).rpartition(".")[2] not in ADAPTER_FUNCTIONS:
        return ""
    keyword = ast.keyword(ADAPTER_KEYWORD, ast.Constant(False))
    return ast.unparse(ast.Call(call.func, call.args, [*call.keywords, keyword]))
