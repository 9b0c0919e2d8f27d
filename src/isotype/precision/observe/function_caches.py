"""The tensors that a module's methods keep in `functools.lru_cache`, such as position tables of some diffusers models.

They were made in an earlier call, which may not have been observed, and no module has them in an attribute.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .lineage import plain_tensors

_CACHE = type(functools.lru_cache(len))
_TABLES = (torch.float32, torch.complex64)  # narrower ones are no tables, and stay values from outside


def cached_tables(model: nn.Module) -> Iterator[Tensor]:
    """Every fp32 and complex64 tensor in the caches of the methods of the model's modules."""
    for kind in {kind for module in model.modules() for kind in type(module).__mro__ if kind is not nn.Module}:
        for method in vars(kind).values():
            for cache in _caches_of(method):
                # the results of a bounded cache; of one without bounds a dict of them
                yield from (t for t in plain_tensors(gc.get_referents(cache), []) if t.dtype in _TABLES)


def _caches_of(method: object) -> Iterator[object]:
    """The method's cache: the method itself, or in a wrapper's closure."""
    if isinstance(method, _CACHE):
        yield method
    for cell in getattr(method, "__closure__", None) or ():
        try:
            if isinstance(cell.cell_contents, _CACHE):
                yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
