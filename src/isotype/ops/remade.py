"""Tensors that backward makes again instead of keeping them: an op notes how its output follows
from what is saved anyway.

gelu(x) of an MLP is four times as wide as the stream, and the layer that reads it needs it in
backward for its adapter's gradient. x is saved in any case. So that layer saves x, and computes
gelu(x) again. `remember` puts the note on the tensor itself: a reader that was given another tensor
(a view, a copy) finds none, and saves what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WAY = "_isotype_way"


class Way(NamedTuple):
    """How a tensor is made again: `make(*tensors)`, which is differentiable, gives the same bits.

    version  how often the tensor had been written to in place when this was noted
    """

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int


class _Chain:
    """`make` of inputs some of which are made again first.

    ways  for each input the function that makes it, or None for one that is kept, and of how many
          tensors
    """

    def __init__(
        self, make: Callable[..., Tensor], ways: list[tuple[Callable[..., Tensor] | None, int]]
    ) -> None:
        self.make = make
        self.ways = ways

    def __call__(self, *tensors: Tensor) -> Tensor:
        inputs = list[Tensor]()
        start = 0
        for make, count in self.ways:
            given = tensors[start : start + count]
            inputs.append(given[0] if make is None else make(*given))
            start += count
        return self.make(*inputs)


def remember(made: Tensor, make: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Notes on `made` that it is `make(*tensors)`, and returns it.

    tensors  those that its own backward saves, or that can be made again themselves
    """
    if not made.requires_grad or torch.compiler.is_compiling():
        return made
    ways = [
        None if (way := getattr(t, _WAY, None)) is None or way.version != t._version else way
        for t in tensors
    ]
    if any(ways):
        make = _Chain(
            make, [(None, 1) if way is None else (way.make, len(way.tensors)) for way in ways]
        )
        tensors = tuple(
            kept for t, way in zip(tensors, ways) for kept in ((t,) if way is None else way.tensors)
        )
    setattr(made, _WAY, Way(make, tensors, made._version))
    return made


def way_of(x: Tensor) -> Way | None:
    """How `x` can be made again; None where nobody has noted it, or someone has written to `x`
    since.
    """
    if torch.compiler.is_compiling():
        # a graph's own partitioner decides what is computed again
        return None
    way: Way | None = getattr(x, _WAY, None)
    if way is not None and way.version == x._version:
        return way
    return None


def follow(made: Tensor, make: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """As `remember`, where one of the tensors can be made again; else `made` is what is best saved."""
    if any(way_of(t) is not None for t in tensors):
        return remember(made, make, *tensors)
    return made


def kept_for(
    x: Tensor, saved: Tensor | None
) -> tuple[Callable[..., Tensor] | None, tuple[Tensor | None, ...]]:
    """(how x is made in backward or None, what is saved for it): `saved`, which is x in the shape
    and dtype that backward reads, or what x is made from. Nothing is made again where backward
    reads nothing (`saved` is None).
    """
    way = None if saved is None else way_of(x)
    if way is None:
        return (None, (saved,))
    return (way.make, way.tensors)


def kept_for_each(
    *tensors: Tensor,
) -> tuple[list[tuple[Callable[..., Tensor] | None, int]], list[Tensor]]:
    """`kept_for` several tensors: for each (how it is made in backward or None, of how many saved
    tensors), and all saved tensors.
    """
    ways: list[tuple[Callable[..., Tensor] | None, int]] = []
    kept: list[Tensor] = []
    graph = torch.compiler.is_compiling()
    for t in tensors:
        way: Way | None = None if graph else getattr(t, _WAY, None)
        if way is None or way.version != t._version:
            ways.append((None, 1))
            kept.append(t)
        else:
            ways.append((way.make, len(way.tensors)))
            kept.extend(way.tensors)
    return ways, kept


def made_again(make: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The tensor, in backward: without a graph."""
    with torch.no_grad():
        return make(*tensors)
