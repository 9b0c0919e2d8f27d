"""The precision of a run is the set of dtypes of its parts, which are called roles. The user
declares the precision once. Isotype then determines one dtype for each role, with a reason, and
compares these dtypes with those that the run really used.

Importing this package does not import torch; importing `apply`, `parts` or `accumulate` does.
"""

from .precision import PRESETS, ROLES, Precision
from .resolution import Resolved, resolve

__all__ = ["PRESETS", "ROLES", "Precision", "Resolved", "resolve"]
