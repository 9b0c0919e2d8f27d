"""`isotype doctor kernels` compiles a Triton kernel for a matrix of dtypes on a machine without a
GPU, and explains the failures.
"""

from .checker import check

__all__ = ["check"]
