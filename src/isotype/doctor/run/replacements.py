"""Replaces functions of PyTorch by functions around them, and sets the originals again.

This module does not import torch, so that a program starts without delay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function of PyTorch that is replaced by a function around it.

    owner  the module or class that holds the function as its attribute `name`
    """

    owner: Any
    name: str
    original: Any
    replacement: Any

    @classmethod
    def make(
        cls, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> Replacement:
        """Replaces an attribute by the function that `wrap` makes of it."""
        original = getattr(owner, name)
        replacement = wrap(original)
        setattr(owner, name, replacement)
        return cls(owner, name, original, replacement)

    def undo(self) -> None:
        """Sets the original again, unless the program has replaced the function too."""
        if getattr(self.owner, self.name) is self.replacement:
            setattr(self.owner, self.name, self.original)
