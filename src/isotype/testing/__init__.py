"""Contains checks for the tests of other projects: `ampcheck`, `compile_matrix`, and a pytest
plugin.

Each of these is imported only when it is first used.
"""

from __future__ import annotations

from typing import Any

from ..lazy_attributes import load_attribute

_LAZY = {
    "ampcheck": "isotype.testing.amp.check",
    "compile_matrix": "isotype.doctor.kernels.calls",
    "ConformanceError": "isotype.testing.amp.check",
    "Report": "isotype.testing.amp.check",
}
__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    return load_attribute(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
