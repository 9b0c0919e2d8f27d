"""Ways to put values on a grid without a cast or a rounding operator: integers in arithmetic, large constants.

Arithmetic with a float widens integers without a cast. A large constant that is added and subtracted again removes the low bits: fp32 has
steps of 2^-8 above 32,768.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .lineage import NOTHING, Lineage, Lineages

_LARGE = 256.0  # a constant that removes at least 8 bits of values near 1
_CANCELLED = 1 / 16


def quantised_operands(inputs: Sequence[Tensor], lineages: Lineages) -> list[Tensor]:
    """The integer operands that were made of floating values: arithmetic with floats widens them without a cast."""
    whole = [tensor for tensor in inputs if not tensor.is_floating_point() and not tensor.is_complex()]
    return [tensor for tensor in whole if (lineages.of(tensor) or NOTHING).integers]


def shifted(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], lineage: Lineage, lineages: Lineages) -> tuple[float, bool]:
    """The constant that a value holds after this operator, and whether a large one was subtracted again."""
    constant = _constant(args[1], lineages) if name in ("add", "sub") and len(args) == 2 else None
    if constant is None:
        return 0.0, False
    total = lineage.shift + (constant if name == "add" else -constant) * float(kwargs.get("alpha", 1))
    return total, abs(lineage.shift) >= _LARGE and abs(total) < abs(lineage.shift) * _CANCELLED


def _constant(value: Any, lineages: Lineages) -> float | None:
    """A number, or the smallest element of a tensor of one sign that is made of no weights and no activations."""
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else None
    if value.device.type != "cpu" or value.requires_grad or not value.numel() or value.is_complex():
        return None
    if value.numel() > 1 and (lineages.of(value) or NOTHING).data:
        return None
    smallest, largest = (float(bound) for bound in value.detach().float().aminmax())
    return smallest if smallest >= 0 else largest if largest <= 0 else None
