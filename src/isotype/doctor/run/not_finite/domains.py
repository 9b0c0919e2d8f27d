"""Finds the line at which rounding moves a value out of the domain of a later operator.

A variance in bf16 that is computed as E[x^2] - E[x]^2 can be negative, and a cosine can be 1.008.
`rsqrt` and `acos` then give NaN, although they are finite in fp32. The cause is the line of the
difference or of the cosine, and not the line that gives NaN.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....observe.origin import Site

NEGATIVE = "negative"
BEYOND_ONE = "beyond_one"
BELOW_ONE = "below_one"
_DOMAINS = (NEGATIVE, BEYOND_ONE, BELOW_ONE)
# what a value outside of the domain is, by the operators that are not defined there
_BY_OPERATOR = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "pow", "xlogy", "logit"), NEGATIVE),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv", "log1p"), BEYOND_ONE),
    "acosh": BELOW_ONE,
}


@dataclass(frozen=True, slots=True)
class Move:
    """An operator whose result is outside of a domain in the run, and inside it in fp32.

    value  the result of the run that is farthest outside
    exact  what this value is in fp32
    """

    site: Site | None
    dtype: torch.dtype
    value: float
    exact: float


def find_domain(operator: str, settings: dict[str, Any]) -> str:
    """Returns what is outside of the domain of an operator, or "" if it is defined everywhere."""
    if operator == "pow" and float(settings.get("exponent", 1)).is_integer():
        return ""
    return _BY_OPERATOR.get(operator, "")


def is_outside(domain: str, low: float, high: float) -> bool:
    """Whether a tensor with these smallest and largest values leaves a domain."""
    return {
        NEGATIVE: low < 0,
        BEYOND_ONE: max(-low, high) > 1,
        BELOW_ONE: low < 1,
    }.get(domain, False)


@torch.no_grad()
def find_moved_values(tensor: Tensor, shadow: Tensor) -> dict[str, Tensor]:
    """Returns domain -> mask of the values that are outside of it because of rounding: in fp32 they
    are inside, or less than half as far outside.
    """
    masks: dict[str, Tensor] = {}
    if shadow is tensor or shadow.shape != tensor.shape or not tensor.is_floating_point():
        return masks
    run = tensor.to(shadow.dtype)
    for domain in _DOMAINS:
        distance = _measure_distance(domain, run)
        mask = (distance > 0) & (2 * _measure_distance(domain, shadow) < distance)
        if bool(mask.any()):
            masks[domain] = mask
    return masks


def _measure_distance(domain: str, values: Tensor) -> Tensor:
    if domain == NEGATIVE:
        return -values
    return values.abs() - 1 if domain == BEYOND_ONE else 1 - values


@torch.no_grad()
def make_move(domain: str, tensor: Tensor, shadow: Tensor, mask: Tensor, site: Site | None) -> Move:
    """Returns the move of the value that rounding put farthest outside of a domain."""
    run = tensor.to(shadow.dtype)
    distance = _measure_distance(domain, run).masked_fill(~mask, float("-inf"))
    index = int(distance.argmax())
    value, exact = float(run.flatten()[index]), float(shadow.flatten()[index])
    return Move(site, tensor.dtype, value, exact)


def covers(mask: Tensor, other: Tensor) -> bool:
    """Whether every value of another mask has the mask set at its place, after broadcasting."""
    try:
        expanded = mask.expand(other.shape)
    except RuntimeError:
        return False
    return not bool((other & ~expanded).any())


def list_variables(line: str) -> list[str]:
    """Returns the variables from which a statement computes, such as mean_sq and mean."""
    try:
        nodes = list(ast.walk(ast.parse(line.strip())))
    except SyntaxError:
        return []
    names: list[str] = []
    called: set[str] = {"self", "torch", "F", "math"}
    for node in nodes:
        match node:
            case ast.Call(ast.Name(name)):
                called.add(name)
            case ast.Name(name, ast.Load()):
                names.append(name)
    return [name for name in dict.fromkeys(names) if name not in called]


def read_target(line: str) -> str:
    """Returns the variable to which a statement assigns, or ""."""
    try:
        body = ast.parse(line.strip()).body
    except SyntaxError:
        return ""
    match body:
        case [ast.Assign([ast.Name(name)], _)]:
            return name
    return ""
