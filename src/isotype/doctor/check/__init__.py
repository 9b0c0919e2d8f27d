"""`isotype doctor check` finds contradictions in training configurations before a run. It imports
no torch.
"""

from .checker import Checked, check

__all__ = ["Checked", "check"]
