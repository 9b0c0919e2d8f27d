"""Isotype: mixed-precision fine-tuning in which every dtype is a declared, checked contract.

Attributes are imported when first used, so that commands that do not need torch do not import it.
"""

from __future__ import annotations

from isotype.lazy_attributes import load_attribute
from isotype.version import __version__ as __version__

# importing typing takes 10 ms, during which Ctrl-C would print a traceback
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from isotype.config.schema import RunConfig as RunConfig
    from isotype.doctor.trace import trace as trace
    from isotype.dtypes import expect as expect
    from isotype.entry.train import Run as Run
    from isotype.entry.train import train as train
    from isotype.finding import Finding as Finding
    from isotype.model.packed import load_packed as load_packed
    from isotype.ops.contract import OpContract as OpContract
    from isotype.optimize import optimize as optimize
    from isotype.optimize import restore as restore
    from isotype.precision import Precision as Precision
    from isotype.training.callbacks import Callback as Callback

_LAZY = {
    "Precision": "isotype.precision",
    "train": "isotype.entry.train",
    "Run": "isotype.entry.train",
    "RunConfig": "isotype.config.schema",
    "Callback": "isotype.training.callbacks",
    "expect": "isotype.dtypes",
    "trace": "isotype.doctor.trace",
    "optimize": "isotype.optimize",
    "restore": "isotype.optimize",
    "load_packed": "isotype.model.packed",
    "Finding": "isotype.finding",
    "OpContract": "isotype.ops.contract",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    return load_attribute(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext isotype` in a notebook explains the dtype errors of its cells."""
    from isotype.doctor.run.hook import install_in_notebook

    install_in_notebook(shell)
