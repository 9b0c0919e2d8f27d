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

_RECIPE_ATTRIBUTE = "_isotype_way"


class Recipe(NamedTuple):
    """How a tensor is made again: `make(*tensors)`, which is differentiable, gives the same bits.

    version  how often the tensor had been written to in place when this was noted
    """

    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int


class _Chain:
    """`make` of inputs some of which are made again first.

    input_recipes  for each input the function that makes it, or None for one that is kept, and of how many
          tensors
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        input_recipes: list[tuple[Callable[..., Tensor] | None, int]],
    ) -> None:
        self.compute = compute
        self.input_recipes = input_recipes

    def __call__(self, *tensors: Tensor) -> Tensor:
        inputs = list[Tensor]()
        start = 0
        for compute, count in self.input_recipes:
            arguments = tensors[start : start + count]
            inputs.append(arguments[0] if compute is None else compute(*arguments))
            start += count
        return self.compute(*inputs)


def mark_recomputable(output: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Notes on `output` that it is `make(*tensors)`, and returns it.

    tensors  those that its own backward saves, or that can be made again themselves
    """
    if not output.requires_grad or torch.compiler.is_compiling():
        return output
    recipes = [
        None
        if (recipe := getattr(t, _RECIPE_ATTRIBUTE, None)) is None or recipe.version != t._version
        else recipe
        for t in tensors
    ]
    if any(recipes):
        compute = _Chain(
            compute,
            [
                (None, 1) if recipe is None else (recipe.compute, len(recipe.tensors))
                for recipe in recipes
            ],
        )
        tensors = tuple(
            saved
            for t, recipe in zip(tensors, recipes)
            for saved in ((t,) if recipe is None else recipe.tensors)
        )
    setattr(output, _RECIPE_ATTRIBUTE, Recipe(compute, tensors, output._version))
    return output


def find_recipe(x: Tensor) -> Recipe | None:
    """How `x` can be made again; None where nobody has noted it, or someone has written to `x`
    since.
    """
    if torch.compiler.is_compiling():
        # a graph's own partitioner decides what is computed again
        return None
    recipe: Recipe | None = getattr(x, _RECIPE_ATTRIBUTE, None)
    if recipe is not None and recipe.version == x._version:
        return recipe
    return None


def propagate_recomputable(
    output: Tensor, compute: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """As `remember`, where one of the tensors can be made again; else `output` is what is best saved."""
    if any(find_recipe(t) is not None for t in tensors):
        return mark_recomputable(output, compute, *tensors)
    return output


def saved_or_recomputed(
    x: Tensor, saved: Tensor | None
) -> tuple[Callable[..., Tensor] | None, tuple[Tensor | None, ...]]:
    """(how x is made in backward or None, what is saved for it): `saved`, which is x in the shape
    and dtype that backward reads, or what x is made from. Nothing is made again where backward
    reads nothing (`saved` is None).
    """
    recipe = None if saved is None else find_recipe(x)
    if recipe is None:
        return (None, (saved,))
    return (recipe.compute, recipe.tensors)


def saved_or_recomputed_each(
    *tensors: Tensor,
) -> tuple[list[tuple[Callable[..., Tensor] | None, int]], list[Tensor]]:
    """`kept_for` several tensors: for each (how it is made in backward or None, of how many saved
    tensors), and all saved tensors.
    """
    recipes: list[tuple[Callable[..., Tensor] | None, int]] = []
    saved: list[Tensor] = []
    is_compiling = torch.compiler.is_compiling()
    for t in tensors:
        recipe: Recipe | None = None if is_compiling else getattr(t, _RECIPE_ATTRIBUTE, None)
        if recipe is None or recipe.version != t._version:
            recipes.append((None, 1))
            saved.append(t)
        else:
            recipes.append((recipe.compute, len(recipe.tensors)))
            saved.extend(recipe.tensors)
    return recipes, saved


def recompute(compute: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The tensor, in backward: without a graph."""
    with torch.no_grad():
        return compute(*tensors)
