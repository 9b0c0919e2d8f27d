"""The version, stated once: a module without imports, which every other may read."""

__version__ = "0.1.0"
