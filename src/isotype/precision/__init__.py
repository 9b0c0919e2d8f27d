"""The precision of a run is the set of dtypes of its parts, which are called roles. The user
declares the precision once. It is resolved to one dtype for each role, each with a reason, and
compared with the dtypes that the run really used.

Importing this package does not import torch; importing `apply`, `parts` or `accumulate` does.
"""

from .precision import PRESETS, ROLES, Precision
from .resolution import Resolved, resolve

__all__ = ["PRESETS", "ROLES", "Precision", "Resolved", "resolve"]
