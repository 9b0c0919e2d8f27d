"""`isotype doctor explain`: from a pasted error or a whole log to the cause and the fix. Imports no
torch.
"""

from .explainer import explain

__all__ = ["explain"]
