"""Contains checks for the tests of other projects: `ampcheck`, `compile_matrix`, and a pytest
plugin.

Each of these is imported only when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "ampcheck": "isotype.testing.amp.check",
    "compile_matrix": "isotype.doctor.kernels.calls",
    "ConformanceError": "isotype.testing.amp.check",
    "Report": "isotype.testing.amp.check",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
