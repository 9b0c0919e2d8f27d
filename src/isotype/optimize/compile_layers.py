"""Makes decoder layers compiled regions (`regions`), and undoes it.

Layers of the form that `layers` runs are regions there; others run their class's own forward as one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from ..errors import UsageError
from ..instance_method import InstanceMethod
from .instances import foreign
from .layers import has_halves, without_cache
from .regions import is_region, mark, region

_OWN = "_isotype_own_region"


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Training steps run these layers compiled from now on. Raises UsageError for a layer whose forward is another library's."""
    for layer in layers:
        if is_region(layer):
            continue
        if not has_halves(layer):
            if reason := foreign(layer):
                raise UsageError(f"model.compile: layers: {type(layer).__name__}: {reason}", fix="model.compile: none")
            vars(layer)[_OWN] = InstanceMethod(own_forward, layer)
            vars(layer)[_OWN].put()
        mark(layer, compiled=True)


def uncompile_layers(layers: Iterable[nn.Module]) -> None:
    """Undoes `compile_layers`; a wrapper that another library has put around a forward since stays."""
    for layer in layers:
        mark(layer, compiled=False)
        if _OWN in vars(layer):
            vars(layer).pop(_OWN).take_back()


def own_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's forward as a region, with gradient checkpointing around it, as transformers' wrapper has it."""
    run = region(self, inspect.unwrap(type(self).forward))
    if not (self.training and self.gradient_checkpointing):
        return run(self, *args, **kwargs)
    if self._can_checkpoint_with_cache:
        return type(self).forward(self, *args, **kwargs)
    without_cache(kwargs)
    return self._gradient_checkpointing_func(partial(run, self, **kwargs), *args)
