"""The rows of each weight that a process will keep of a shared model, known before the model is cut.

A model's weights come from files that are mapped into memory: a weight in the file's dtype takes no memory until it is read. A cast would
read it whole, in every process. `Part` casts its own rows only, into a tensor of the whole shape. The system gives memory to the pages that
are written, so that the tensor takes what these rows take.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def loaded_on(device: torch.device, part: Part | None) -> torch.device:
    """Where a model's weights are loaded: on the run's device, or, where several processes share the model, on the CPU, from where each
    unit's part goes to the device."""
    return device if part is None else torch.device("cpu")


def _unwritten(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor whose memory the system gives page by page as it is written, and gets back when the tensor is freed. malloc would reuse
    blocks that were freed before, and keep them."""
    size = shape.numel() * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def _nothing(model: nn.Module) -> None: ...


@dataclass(frozen=True)
class Part:
    """Process `rank` of `parts` that share each weight by rows.

    look  called once with the model as it was loaded, while every weight still has all its rows
    """

    rank: int
    parts: int
    look: Callable[[nn.Module], None] = _nothing

    def narrowed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, in its whole shape, on the CPU. Only the own rows have values, except of vectors, which are small.

        weight  any dtype [rows ...]
        ->      dtype     [rows ...]
        """
        if weight.dim() < 2:
            return weight.to(dtype)
        whole = _unwritten(weight.shape, dtype)
        for mine, its in zip(whole.chunk(self.parts)[self.rank :][:1], weight.chunk(self.parts)[self.rank :][:1]):
            mine.copy_(its)
        return whole
