"""`isotype.optimize(model, precision)` replaces modules of a model by Isotype's ops;
`isotype.restore(model)` undoes it.

place       `optimize` and `restore`, which go through all modules of a model
manifest    the list of replaced modules, with the reasons why others were not replaced
instances   comparison of modules with small test inputs, and copies of forwards with their own
            globals
layers, norms, gated, rotary, attention, head, denoiser, joint_attention
            one kind of module each. They recognise this kind by its structure, compare a module
            with the op for a small test input, and replace the forward of the instance
forwards    the forwards of replaced modules, and the check in each step that they are unchanged
deferred, deferred_tensor, deferred_values
            logits that are computed only when needed, for losses in other libraries' loops
generation  `model.generate` during training
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .forwards import check_placed
from .head import deferring
from .manifest import Manifest
from .place import optimize, restore

__all__ = ["Manifest", "check_placed", "deferring", "optimize", "restore"]


class _Callable(ModuleType):
    """Makes this package callable. `isotype.optimize` is the function `optimize` until this package
    is imported, and the package after that. So the package must accept the same calls as the
    function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Manifest:
        return optimize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
