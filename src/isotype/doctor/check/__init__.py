"""`isotype doctor check`: contradictions in training configurations, found before a run. Imports no
torch.
"""

from .checker import Checked, check

__all__ = ["Checked", "check"]
