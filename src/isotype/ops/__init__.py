"""Contains the fused ops. Each op declares a dtype rule (its `OpContract`). An op is a folder of
`op.py` (contract, reference, function), `triton.py` and `cpu.cpp`.

Attributes are imported when first used, so that the doctor can read `isotype.ops.contract` without
torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..lazy_attributes import load_attribute

if TYPE_CHECKING:
    from .attention.op import attention as attention
    from .contract import OpContract as OpContract
    from .cross_entropy.op import cross_entropy as cross_entropy
    from .experts.op import experts as experts
    from .gated.op import gelu as gelu
    from .gated.op import gelu_mul as gelu_mul
    from .gated.op import silu_mul as silu_mul
    from .linear_cross_entropy.op import linear_cross_entropy as linear_cross_entropy
    from .linear_divergence.op import linear_divergence as linear_divergence
    from .modulation.op import gated_residual as gated_residual
    from .modulation.op import modulated_layer_norm as modulated_layer_norm
    from .rms_norm.op import add_rms_norm as add_rms_norm
    from .rms_norm.op import rms_norm as rms_norm
    from .rope.op import rope as rope
    from .token_log_probs import TokenLogProbs as TokenLogProbs
    from .token_log_probs import linear_log_probs as linear_log_probs

# name -> the module that defines it, which is imported when the name is first used
_LAZY = {
    "OpContract": "isotype.ops.contract",
    "attention": "isotype.ops.attention.op",
    "cross_entropy": "isotype.ops.cross_entropy.op",
    "experts": "isotype.ops.experts.op",
    "linear_cross_entropy": "isotype.ops.linear_cross_entropy.op",
    "linear_divergence": "isotype.ops.linear_divergence.op",
    "linear_log_probs": "isotype.ops.token_log_probs",
    "TokenLogProbs": "isotype.ops.token_log_probs",
    "rms_norm": "isotype.ops.rms_norm.op",
    "add_rms_norm": "isotype.ops.rms_norm.op",
    "rope": "isotype.ops.rope.op",
    "silu_mul": "isotype.ops.gated.op",
    "gelu_mul": "isotype.ops.gated.op",
    "gelu": "isotype.ops.gated.op",
    "modulated_layer_norm": "isotype.ops.modulation.op",
    "gated_residual": "isotype.ops.modulation.op",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    globals()[name] = load_attribute(__name__, _LAZY, name)
    return globals()[name]


class _Ops(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # importing the package isotype.ops.rope binds the package to the name `rope` here; the name
        # must stay bound to the op
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops


def __dir__() -> list[str]:
    return sorted(__all__)
