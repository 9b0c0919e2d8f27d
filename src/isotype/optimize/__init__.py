"""`isotype.optimize(model, precision)` replaces modules of a model by Isotype's ops;
`isotype.restore(model)` undoes it.

place       the walk over a model
manifest    the list of replaced modules, and the reasons why others were not replaced
instances   probes, and forwards over private globals
layers, norms, gated, rotary, attention, head, denoiser, joint_attention
            one kind of module each: recognise it by structure, probe it, replace it on the instance
forwards    the forwards of replaced modules, and the check once a step that they are unchanged
deferred, deferred_tensor, deferred_values
            logits that are not computed yet, for losses in other libraries' loops
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
    """`isotype.optimize` is this package once it is imported, and the function before: both are
    called alike.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Manifest:
        return optimize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
