"""`isotype doctor kernels` compiles a Triton kernel for many combinations of argument dtypes, and
explains the compilations that fail. It needs no GPU.
"""

from .checker import check

__all__ = ["check"]
