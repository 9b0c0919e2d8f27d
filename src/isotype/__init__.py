"""Isotype: mixed-precision fine-tuning in which every dtype is a declared, checked contract.

Attributes are imported when first used, so that the torch-free commands stay torch-free.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing is 10 ms in which Ctrl-C is a traceback
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Precision": "isotype.precision",
    "expect": "isotype.testing.expect",
    "trace": "isotype.doctor.trace",
    "optimize": "isotype.optimize",
    "restore": "isotype.optimize",
    "Finding": "isotype.finding",
    "OpContract": "isotype.ops.contract",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'isotype' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
