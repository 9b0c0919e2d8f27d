"""The rules: each registers itself under its code when its module is imported."""

from . import axolotl, contradictions, distributed, huggingface, llamafactory, other_tools, simpletuner  # noqa: F401
from .base import RULES, page

__all__ = ["RULES", "page"]
