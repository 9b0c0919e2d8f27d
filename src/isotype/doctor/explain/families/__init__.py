"""The families of errors: each file holds what one part of a program refuses, its causes and its pages. Most are sheets, a few are code."""

from pathlib import Path

from ..sheets import register
from . import arguments, demands  # noqa: F401  each registers itself

for _sheet in sorted(Path(__file__).parent.glob("*.txt")):
    register(_sheet)
