"""`isotype doctor trace`: runs a program unchanged, gives each floating tensor a provenance,
explains dtype errors, finds silent faults.
"""

from .session import trace

__all__ = ["trace"]
