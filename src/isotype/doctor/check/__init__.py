"""`isotype doctor check` finds contradictions in training configurations before a run. It imports
no torch.
"""

from .checker import CheckResult, check

__all__ = ["CheckResult", "check"]
