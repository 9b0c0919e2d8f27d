"""`isotype doctor kernels`: a Triton kernel's dtype matrix compiled on a machine without a GPU, and
what fails in it explained.
"""

from .checker import check

__all__ = ["check"]
