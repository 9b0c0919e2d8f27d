"""Follows the dtypes of block values through Triton kernels, read as source: neither Triton nor a compiler is needed."""
