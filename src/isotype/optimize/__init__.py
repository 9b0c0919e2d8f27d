"""`isotype.optimize(model, precision)` replaces modules of a model by Isotype's ops; `isotype.restore(model)` undoes it.

manifest   the list of replaced modules, and the reasons why others were not replaced
norms, gated, rotary, head   one kind of module each: recognise it by structure, probe it, replace it on the instance
deferred   logits not yet computed
generation `model.generate` in the middle of training
base       the manifest's notes on the weights of the base
regions, compile_layers  decoder layers as graphs of `torch.compile`, which a run asks for (`model.compile`)
place      the walk over a model
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .head import deferring
from .manifest import Manifest
from .place import check_placed, optimize, restore

__all__ = ["Manifest", "check_placed", "deferring", "optimize", "restore"]


class _Callable(ModuleType):
    """`isotype.optimize` is this package once it is imported, and the function before: both are called alike."""

    def __call__(self, *args: Any, **kwargs: Any) -> Manifest:
        return optimize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
