"""Which code is a library's, and which a program's or a model's own: by the package that a class or a function was written in."""

from __future__ import annotations

from typing import Any

_LIBRARIES = frozenset((
    "accelerate", "bitsandbytes", "datasets", "diffusers", "isotype", "numpy", "pandas", "peft", "pyarrow", "rich", "tokenizers", "torch",
    "tqdm", "transformers", "trl",
))  # fmt: skip


def package_of(made: Any) -> str:
    """The package of a class or a function: the first part of its module's name."""
    return str(getattr(made, "__module__", None) or "builtins").partition(".")[0]


def of_a_library(made: Any) -> bool:
    """Whether a class or a function was written in a library that Isotype knows; the standard library is none of them.

    The code that a model of the hub brings lies in `transformers_modules`, and is its own.
    """
    return package_of(made) in _LIBRARIES
