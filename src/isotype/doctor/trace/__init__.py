"""`isotype doctor trace` runs a program unchanged and records the origin of each floating-point
tensor's dtype. The command explains dtype errors and finds faults that raise no error.
"""

from .session import trace

__all__ = ["trace"]
