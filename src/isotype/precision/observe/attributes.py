"""The tensors that a module keeps in plain attributes, also in lists and mappings, as tables are kept that its forward makes once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .lineage import plain_tensors

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def kept_in_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor. A weight in a list, as one that is shared, stays a weight."""
    for name, value in vars(module).items():
        if name not in _OF_EVERY_MODULE:
            yield from ((name, t) for t in plain_tensors(value, []) if not isinstance(t, nn.Parameter))
