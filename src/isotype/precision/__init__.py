"""Precision: which dtype each role of a run has, declared once, resolved with reasons, checked against what the run really did.

Importing this package imports no torch; `apply`, `observe` and `accumulate` do when they are imported.
"""

from .precision import ROLES, Precision
from .presets import PRESETS
from .resolve import Resolved, resolve

__all__ = ["PRESETS", "ROLES", "Precision", "Resolved", "resolve"]
