"""The number of logits in memory at once: from shapes and constants alone, never from free memory, so that a run repeats."""

from __future__ import annotations

import torch

from ...environment.planned import stands_for

# Bytes of logits. On a CPU more rows only cost memory once a product is past 256 rows, and a new buffer's pages cost 0.3 ms a MiB; a head's
# gradient is summed once a chunk in V x H of fp32, which fewer chunks save.
# A GPU's product of N rows does 2 N H V operations on 2 H V bytes of weight and 4 N V of logits: 523 rows (256 MiB at V 128,256) are 416
# operations a byte at H 4096, past the ridge of an H200 (184 measured: 788 TFLOP/s over 4.3 TB/s) and an H100 (about 260). The head's own
# gradient is read and written in fp32, 8 H V bytes a chunk: N / 4 operations a byte, past the ridge from 1,046 rows on (512 MiB).
_BUDGET = {"cpu": 64 * 2**20}
_BUDGET_WITH_HEAD = {"cpu": 256 * 2**20}
_BUDGET_ELSEWHERE = 256 * 2**20
_BUDGET_WITH_HEAD_ELSEWHERE = 512 * 2**20
_MULTIPLE = 64


def budget(device: torch.device, head: bool) -> int:
    if head:
        return _BUDGET_WITH_HEAD.get(stands_for(device), _BUDGET_WITH_HEAD_ELSEWHERE)
    return _BUDGET.get(stands_for(device), _BUDGET_ELSEWHERE)


def extent(tokens_or_classes: int, other: int, itemsize: int, device: torch.device, head: bool) -> int:
    """How many of the first fit the budget beside all of the second, in equal parts; `head` where the head's gradient is wanted."""
    most = max(_MULTIPLE, budget(device, head) // max(1, other * itemsize))
    parts = max(1, -(-tokens_or_classes // most))
    equal = -(-tokens_or_classes // parts)
    return max(1, -(-equal // _MULTIPLE) * _MULTIPLE)
