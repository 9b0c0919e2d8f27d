"""Precision: the dtype of each role of a run. It is declared once, resolved with reasons, and checked against what the run really did.

Importing this package does not import torch; importing `apply`, `observe` or `accumulate` does.
"""

from .precision import ROLES, Precision
from .presets import PRESETS
from .resolve import Resolved, resolve

__all__ = ["PRESETS", "ROLES", "Precision", "Resolved", "resolve"]
