"""`isotype doctor explain` finds the cause and the fix of an error in a pasted message or a whole
log. It imports no torch.
"""

from .explainer import explain

__all__ = ["explain"]
