"""The schema of a run, its files and overrides. Imports no torch."""

from .schema import RunConfig

__all__ = ["RunConfig"]
