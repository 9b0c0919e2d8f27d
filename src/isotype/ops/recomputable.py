"""Marks tensors that backward can recompute, so that they are not saved.

An example is gelu(x) in an MLP, which is four times as wide as the residual stream. The next layer
needs gelu(x) in backward, for the gradient of its adapter. It does not save gelu(x), because x is
saved in any case and backward can compute gelu(x) again from x. The op that returns a tensor stores
on this tensor how it is recomputed (`mark_recomputable`). This is called its recipe. A view or a
copy of the tensor has no recipe, so a layer that gets a view or a copy saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# (the function that recomputes a tensor, or None if the tensor itself is saved; the number of saved
# tensors that it takes)
InputRecipe = tuple[Callable[..., Tensor] | None, int]
_RECIPE_ATTRIBUTE = "_isotype_recipe"  # attribute of a tensor with its recipe


class RecomputeRecipe(NamedTuple):
    """Describes how a tensor is recomputed. `compute(*tensors)` returns exactly the values of the
    tensor, and is differentiable.

    version  the tensor's `_version` (its number of in-place writes) when the recipe was stored
    """

    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int


class _Chain:
    """A function that recomputes some of the inputs of `compute`, and then calls `compute`."""

    def __init__(self, compute: Callable[..., Tensor], input_recipes: list[InputRecipe]) -> None:
        self.compute = compute
        self.input_recipes = input_recipes

    def __call__(self, *tensors: Tensor) -> Tensor:
        inputs = list[Tensor]()
        start = 0
        for compute, count in self.input_recipes:
            arguments = tensors[start : start + count]
            if compute is None:
                inputs.append(arguments[0])
            else:
                inputs.append(compute(*arguments))
            start += count
        return self.compute(*inputs)


def mark_recomputable(output: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Stores on `output` that `compute(*tensors)` recomputes it, and returns `output`.

    tensors  tensors that the backward of `output` saves in any case, or that can be recomputed
             themselves
    """
    if not output.requires_grad or torch.compiler.is_compiling():
        return output
    recipes: list[InputRecipe] = []
    saved: list[Tensor] = []
    has_recipe = False
    for tensor in tensors:
        recipe: RecomputeRecipe | None = getattr(tensor, _RECIPE_ATTRIBUTE, None)
        if recipe is None or recipe.version != tensor._version:
            recipes.append((None, 1))
            saved.append(tensor)
        else:
            has_recipe = True
            recipes.append((recipe.compute, len(recipe.tensors)))
            saved.extend(recipe.tensors)
    if has_recipe:
        compute = _Chain(compute, recipes)
    setattr(output, _RECIPE_ATTRIBUTE, RecomputeRecipe(compute, tuple(saved), output._version))
    return output


def find_recompute_recipe(x: Tensor) -> RecomputeRecipe | None:
    """Returns the recipe that says how `x` can be recomputed. Returns None if `x` has no recipe, or
    if `x` was changed in place after the recipe was stored.
    """
    if torch.compiler.is_compiling():
        # the partitioner of a compiled graph decides what is recomputed
        return None
    recipe: RecomputeRecipe | None = getattr(x, _RECIPE_ATTRIBUTE, None)
    if recipe is not None and recipe.version == x._version:
        return recipe
    return None


def propagate_recomputable(
    output: Tensor, compute: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Calls `mark_recomputable` if one of `tensors` can be recomputed. Otherwise it returns
    `output` unchanged, because saving `output` itself then takes the least memory.
    """
    if any(find_recompute_recipe(t) is not None for t in tensors):
        return mark_recomputable(output, compute, *tensors)
    return output


def saved_or_recomputed(
    x: Tensor, saved: Tensor | None
) -> tuple[Callable[..., Tensor] | None, tuple[Tensor | None, ...]]:
    """Returns two values: the function that recomputes x in backward, or None, and the tensors to
    save for backward.

    saved  x in the shape and dtype that backward reads, which is saved if x cannot be recomputed;
           None if backward does not read x
    """
    if saved is None:
        return None, (None,)
    recipe = find_recompute_recipe(x)
    if recipe is None:
        return None, (saved,)
    return recipe.compute, recipe.tensors


def saved_or_recomputed_each(*tensors: Tensor) -> tuple[list[InputRecipe], list[Tensor]]:
    """Does the same as `saved_or_recomputed` for several tensors. Returns (how each tensor is
    recomputed, all tensors to save).
    """
    if torch.compiler.is_compiling():
        return [(None, 1)] * len(tensors), list(tensors)
    recipes: list[InputRecipe] = []
    saved: list[Tensor] = []
    for tensor in tensors:
        recipe: RecomputeRecipe | None = getattr(tensor, _RECIPE_ATTRIBUTE, None)
        if recipe is None or recipe.version != tensor._version:
            recipes.append((None, 1))
            saved.append(tensor)
        else:
            recipes.append((recipe.compute, len(recipe.tensors)))
            saved.extend(recipe.tensors)
    return recipes, saved


def recompute(compute: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Recomputes a tensor in backward, without an autograd graph."""
    with torch.no_grad():
        return compute(*tensors)
