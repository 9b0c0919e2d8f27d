"""The settings of a run: their schema, and the reading and writing of configuration files. Imports
no torch.
"""

from .schema import RunConfig

__all__ = ["RunConfig"]
