"""How much of the logits exists at once: from shapes and constants alone, never from free memory, so that a run repeats."""

from __future__ import annotations

import torch

# Bytes of logits. On a CPU more rows only cost memory once a product is past 256 rows; a GPU needs about 700 rows to reach its ridge.
_BUDGET = {"cpu": 256 * 2**20}
_BUDGET_ELSEWHERE = 2**30
_MULTIPLE = 64


def budget(device: torch.device) -> int:
    return _BUDGET.get(device.type, _BUDGET_ELSEWHERE)


def extent(tokens_or_classes: int, other: int, itemsize: int, device: torch.device) -> int:
    """How many of the first fit the budget beside all of the second, in equal parts."""
    most = max(_MULTIPLE, budget(device) // max(1, other * itemsize))
    parts = max(1, -(-tokens_or_classes // most))
    equal = -(-tokens_or_classes // parts)
    return max(1, -(-equal // _MULTIPLE) * _MULTIPLE)
