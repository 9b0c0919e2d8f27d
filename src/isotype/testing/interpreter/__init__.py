"""Runs Triton kernels on a CPU with correct numbers: Triton's interpreter with repairs, for kernels with the usual decorator.

    with interpreted():
        silu_mul_forward[grid](gate, up, out, n, BLOCK=128)      # CPU tensors

`install()` does the same for the rest of the process. Neither needs TRITON_INTERPRET=1, nor a particular order of imports, and outside
the block kernels compile as ever. Triton 3.9's own interpreter truncates fp32 to bf16 and adds,
multiplies and sums bf16 as raw bits.
"""

from .session import install, interpreted, is_installed

__all__ = ["install", "interpreted", "is_installed"]
