"""Finds a tensor in the batch that a Trainer passes to its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .frames import CallFrame


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A tensor of a batch.

    variable     the variable of the Trainer's frame that holds the batch
    frame_index  the index of this frame
    """

    key: str
    variable: str
    frame_index: int


def find_batch_item(
    frames: Sequence[CallFrame], wanted: torch.Tensor | torch.dtype | None
) -> BatchItem | None:
    """Searches the batch of a Trainer for a tensor, or for the only tensor of a dtype. Returns None
    if no frame belongs to an object with a `data_collator`.
    """
    for index, frame in enumerate(frames):
        owner = frame.variables.get("self")
        if "data_collator" not in getattr(owner, "__dict__", {}):
            continue
        for variable, value in frame.variables.items():
            items = getattr(value, "data", value)  # BatchEncoding of transformers
            if not isinstance(items, Mapping):
                continue
            keys = [key for key, item in items.items() if _is_wanted(item, wanted)]
            if len(keys) == 1 and isinstance(keys[0], str):
                return BatchItem(keys[0], variable, index)
    return None


def _is_wanted(item: object, wanted: torch.Tensor | torch.dtype | None) -> bool:
    if not isinstance(item, torch.Tensor):
        return False
    return item is wanted or item.dtype == wanted
