"""Finds the expression that gave a tensor its dtype."""

from .expression_search import find_constructor_argument, find_producer

__all__ = ["find_constructor_argument", "find_producer"]
