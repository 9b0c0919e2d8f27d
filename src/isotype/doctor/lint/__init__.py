"""`isotype lint`: finds dtype faults in source code without importing it; needs neither torch nor Triton.

A rule is one file in `rules/`; what follows dtypes through a function is in `dataflow/` (PyTorch) and `triton/` (kernels).
"""
