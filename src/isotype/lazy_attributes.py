"""Imports the attributes of a package when they are first used (PEP 562)."""

from __future__ import annotations

from importlib import import_module

# importing typing takes 10 ms, during which Ctrl-C would print a traceback
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def load_attribute(package: str, modules: Mapping[str, str], name: str) -> Any:
    """Returns the attribute `name` of a package from the module that defines it. Raises
    AttributeError for a name that the package does not have.

    modules  name of an attribute -> name of the module that defines it
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
