"""Ops with contracts: each is a folder with its contract, a reference, an eager path, Triton kernels and an autograd function.

Attributes are imported when first used, so that the doctor can read `isotype.ops.contract` without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.function import attention as attention
    from .contract import OpContract as OpContract
    from .cross_entropy.function import cross_entropy as cross_entropy
    from .gated_residual.function import gated_residual as gated_residual
    from .gelu.function import gelu as gelu
    from .gelu_mul.function import gelu_mul as gelu_mul
    from .linear_cross_entropy.function import TokenStatistics as TokenStatistics
    from .linear_cross_entropy.function import linear_cross_entropy as linear_cross_entropy
    from .linear_log_probs.function import TokenLogProbs as TokenLogProbs
    from .linear_log_probs.function import linear_log_probs as linear_log_probs
    from .modulated_layer_norm.function import modulated_layer_norm as modulated_layer_norm
    from .rms_norm.function import add_rms_norm as add_rms_norm
    from .rms_norm.function import rms_norm as rms_norm
    from .rope.function import rope as rope
    from .silu_mul.function import silu_mul as silu_mul

_LAZY = {
    "OpContract": "isotype.ops.contract",
    "attention": "isotype.ops.attention.function",
    "cross_entropy": "isotype.ops.cross_entropy.function",
    "linear_cross_entropy": "isotype.ops.linear_cross_entropy.function",
    "TokenStatistics": "isotype.ops.linear_cross_entropy.function",
    "linear_log_probs": "isotype.ops.linear_log_probs.function",
    "TokenLogProbs": "isotype.ops.linear_log_probs.function",
    "rms_norm": "isotype.ops.rms_norm.function",
    "add_rms_norm": "isotype.ops.rms_norm.function",
    "rope": "isotype.ops.rope.function",
    "silu_mul": "isotype.ops.silu_mul.function",
    "gelu_mul": "isotype.ops.gelu_mul.function",
    "gelu": "isotype.ops.gelu.function",
    "modulated_layer_norm": "isotype.ops.modulated_layer_norm.function",
    "gated_residual": "isotype.ops.gated_residual.function",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'isotype.ops' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_LAZY[name]), name)
    return globals()[name]


class _Ops(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # importing the folder isotype.ops.rope would bind its module to the name of the op: the op keeps it
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops


def __dir__() -> list[str]:
    return sorted(__all__)
