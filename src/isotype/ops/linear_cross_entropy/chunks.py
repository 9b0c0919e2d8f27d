"""How much of the logits exists at once: from shapes and constants alone, never from free memory, so that a run repeats."""

from __future__ import annotations

import torch

# Bytes of logits. On a CPU more rows only cost memory once a product is past 256 rows, and a new buffer's pages cost 0.3 ms a MiB; a head's
# gradient is summed once a chunk in V x H of fp32, which fewer chunks save. A GPU needs about 700 rows to reach its ridge.
_BUDGET = {"cpu": 64 * 2**20}
_BUDGET_WITH_HEAD = {"cpu": 256 * 2**20}
_BUDGET_ELSEWHERE = 2**30
_MULTIPLE = 64


def budget(device: torch.device, head: bool) -> int:
    return (_BUDGET_WITH_HEAD if head else _BUDGET).get(device.type, _BUDGET_ELSEWHERE)


def extent(tokens_or_classes: int, other: int, itemsize: int, device: torch.device, head: bool) -> int:
    """How many of the first fit the budget beside all of the second, in equal parts; `head` where the head's gradient is wanted."""
    most = max(_MULTIPLE, budget(device, head) // max(1, other * itemsize))
    parts = max(1, -(-tokens_or_classes // most))
    equal = -(-tokens_or_classes // parts)
    return max(1, -(-equal // _MULTIPLE) * _MULTIPLE)
