"""The rows of each weight that a process will keep of a shared model, known before the model is cut.

A model's weights come from files that are mapped into memory: a weight in the file's dtype takes no memory until it is read. A cast would
read it whole, in every process. `Part` casts its own rows only, into a tensor of the whole shape. The system gives memory to the pages that
are written, so that the tensor takes what these rows take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


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
        whole = torch.empty(weight.shape, dtype=dtype)
        for mine, its in zip(whole.chunk(self.parts)[self.rank :][:1], weight.chunk(self.parts)[self.rank :][:1]):
            mine.copy_(its)
        return whole
