"""Explains NaN in the backward of a matrix decomposition.

The derivative of eigenvectors divides by the differences of the eigenvalues, that of singular
vectors also by the singular values, and that of a QR decomposition by the diagonal of R. A
covariance that starts as a multiple of the identity has equal eigenvalues: its first backward is
NaN, although the loss is finite.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_EQUAL = 1e-5  # a difference, relative to the largest value, below which two values count as equal
_SHIFT = 1e-3  # what the fix adds to the diagonal, relative to the largest value


@dataclass(frozen=True, slots=True)
class Divisor:
    """The values by which the backward of a decomposition divides.

    name      what they are, such as "differences of the eigenvalues"
    smallest  the smallest of their magnitudes
    shift     a number for the diagonal of the matrix that makes them larger
    """

    name: str
    smallest: float
    shift: float


@torch.no_grad()
def read_divisor() -> Divisor | None:
    """Returns the values by which the running backward of a decomposition divides, if one of them
    is 0 or nearly 0.
    """
    node: Any = torch._C._current_autograd_node()
    name = "" if node is None else node.name()
    if name.startswith("LinalgEighBackward"):
        values = node._saved_eigenvalues.double()
        divisors = [("differences of the eigenvalues", _smallest_difference(values))]
    elif name.startswith("LinalgSvdBackward"):
        values = node._saved_S.double()
        divisors = [
            ("differences of the singular values", _smallest_difference(values)),
            ("singular values", _smallest_magnitude(values)),
        ]
    elif name.startswith("LinalgQrBackward"):
        values = node._saved_R.double().diagonal(dim1=-2, dim2=-1)
        divisors = [("values on the diagonal of R", _smallest_magnitude(values))]
    else:
        return None
    largest = float(values.abs().max()) if values.numel() else 0.0
    label, smallest = min(divisors, key=lambda divisor: divisor[1])
    if smallest > _EQUAL * largest:
        return None
    return Divisor(label, smallest, _SHIFT * (largest or 1.0))


def _smallest_difference(values: Tensor) -> float:
    if values.shape[-1] < 2:
        return float("inf")
    return _smallest_magnitude(values.sort(-1).values.diff(dim=-1))


def _smallest_magnitude(values: Tensor) -> float:
    return float(values.abs().min()) if values.numel() else float("inf")


def describe_divisor(divisor: Divisor, matrix: str) -> dict[str, str]:
    """Returns the values for the text about a decomposition.

    matrix  the program's expression for its input, or ""
    """
    is_name = matrix.replace(".", "").isidentifier()
    name = matrix if is_name else "A"
    first = f"{divisor.shift:.1g}"
    last = f"{2 * float(first):.1g}"
    diagonal = f"torch.linspace({first}, {last}, {name}.shape[-1])"
    shifted = f"{name} + (torch.eye(*{name}.shape[-2:]) * {diagonal}).to({name})"
    assignment = f"A = {matrix}; " if matrix and not is_name else ""
    return {
        "divisor": divisor.name,
        "value": f"{divisor.smallest:.2g}",
        "shifted": f"{assignment}{shifted} in place of {name}",
    }


def read_matrix(node: ast.expr) -> str:
    """Returns the first argument of a call such as `torch.linalg.eigh(A)`, or ""."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("torch" | "linalg" | "LA")), [matrix, *_]):
            return ast.unparse(matrix)
        case ast.Call(ast.Attribute(ast.Attribute(ast.Name(), "linalg")), [matrix, *_]):
            return ast.unparse(matrix)
        case ast.Call(ast.Attribute(owner, _), []):
            return ast.unparse(owner)
    return ""
