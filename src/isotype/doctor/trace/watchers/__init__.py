"""Each file watches for one way in which a program goes wrong without an error. A file that is added here is found and used."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..context import Watcher


def every() -> list[type[Watcher]]:
    """The watchers of this folder's files, by their order."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Watcher) and value.__module__ == module.__name__
    ]
    return sorted(found, key=lambda kind: kind.order)
