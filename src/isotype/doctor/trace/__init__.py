"""`isotype trace`: runs a program unchanged, gives every floating tensor a provenance, explains dtype errors, finds silent faults."""

from .session import trace

__all__ = ["trace"]
