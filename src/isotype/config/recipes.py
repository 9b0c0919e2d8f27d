"""The values of `--preset`: a recipe (a named way to train), or the name of a precision. Imports no torch.

The `precision.preset` of a recipe overrides the file; its other settings apply only where the file sets nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .expected import keys

STRONG = "precision.preset"


@dataclass(frozen=True)
class Recipe:
    """A name for settings that belong together."""

    about: str
    settings: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "lora": Recipe("LoRA adapter; precision from the device", {"precision.preset": "auto", "adapter.kind": "lora"}),
    "qlora": Recipe("LoRA adapter on a 4-bit base", {"precision.preset": "nf4-lora", "adapter.kind": "lora"}),
    "full": Recipe(
        "every weight; precision from the device",
        {"precision.preset": "auto", "adapter.kind": "none", "train.learning_rate": 2e-5},
    ),
    "full-bf16": Recipe(
        "every weight, in bf16 with stochastic rounding: half the memory of full",
        {"precision.preset": "bf16-pure", "adapter.kind": "none", "train.learning_rate": 2e-5},
    ),
}
_WITHOUT_ADAPTER = ("bf16-mixed", "bf16-pure")  # the precisions of full fine-tuning


def names() -> list[str]:
    return [*RECIPES, *keys()[STRONG]["enum"]]


def recipe(name: str) -> Recipe:
    """The recipe or precision of that name. Raises UsageError with the known names."""
    if name in RECIPES:
        return RECIPES[name]
    if name in keys()[STRONG]["enum"]:
        settings: dict[str, Any] = {STRONG: name}
        if name in _WITHOUT_ADAPTER:
            settings |= {"adapter.kind": "none", "train.learning_rate": 2e-5}
        return Recipe(f"precision {name}", settings)
    raise UsageError(f"--preset {name}: unknown; one of {' '.join(names())}")
