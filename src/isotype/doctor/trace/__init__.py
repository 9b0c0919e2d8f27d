"""`isotype doctor trace` runs a program unchanged and records the origin of each floating-point
tensor's dtype. It explains dtype errors and finds faults that raise no error.
"""

from .session import trace

__all__ = ["trace"]
