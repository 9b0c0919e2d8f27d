"""The rules: each registers itself under its code when its module is imported."""

from . import axolotl, contradictions, distributed, hardware, huggingface, llamafactory, other_tools, silent_losses, simpletuner  # noqa: F401
from .base import RULES, page

__all__ = ["RULES", "page"]
