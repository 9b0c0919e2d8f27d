"""What the interpreter saw: something torch would refuse, or that loses precision, in one scenario on one path."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

from .values import Tensor

Kind = Literal["matmul", "out", "in_place", "attention", "scatter", "accumulate", "table", "returned"]


Launches = dict[ast.Call, list[tuple[list[Any], dict[str, Any]]]]  # `kernel[grid](...)` -> what it was handed, each time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The dtypes a function is tried with.

    inputs, weights  of activations, and of what is named or registered like a weight
    autocast         the region's dtype, or None outside one
    device           of the region: decorators written for another device do nothing
    """

    inputs: str
    weights: str
    autocast: str | None = None
    device: str = "cuda"

    @property
    def mixed_weights(self) -> bool:
        """Weights of another dtype than the activations, without an autocast that brings them together."""
        return self.autocast is None and self.inputs != self.weights

    def __str__(self) -> str:
        dtypes = f"{self.inputs} inputs" if self.inputs == self.weights else f"{self.inputs} activations with {self.weights} weights"
        return f"{dtypes} under {self.autocast} autocast" if self.autocast else f"{dtypes}, no autocast"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Event:
    """operands: source text and value, in the order of the operation; path: the branches taken, as text."""

    kind: Kind
    node: ast.expr | ast.stmt
    operation: str
    operands: tuple[tuple[str, Tensor], ...]
    scenario: Scenario
    phase: str
    path: tuple[str, ...] = ()
    symbol: str | None = None
    loop: ast.AST | None = None
    value: Any = None
