"""Precision: the dtype of each role of a run. The precision is declared once, resolved with
reasons, and checked against the dtypes that the run really had.

Importing this package does not import torch; importing `apply`, `parts` or `accumulate` does.
"""

from .precision import PRESETS, ROLES, Precision
from .resolution import Resolved, resolve

__all__ = ["PRESETS", "ROLES", "Precision", "Resolved", "resolve"]
