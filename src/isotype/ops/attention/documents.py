"""Where packed documents begin and end, made on the host, where the rows are put together: no layer has to look for borders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """The documents of all rows, one row after the other.

    bounds   int32[E+1]  where each of E documents begins among all tokens, and the number of tokens
    longest  the tokens of the longest
    whole_rows  each row is one document: plain causal attention of a batch
    """

    bounds: Tensor
    longest: int
    whole_rows: bool = False

    @classmethod
    def rows(cls, batch: int, positions: int, device: torch.device) -> Documents:
        """Every row is a separate document."""
        bounds = torch.arange(0, (batch + 1) * positions, max(positions, 1), dtype=torch.int32, device=device)
        return cls(bounds, positions, True)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Documents:
        """From the documents' lengths in order; empty ones are left out. On the CPU."""
        lengths = [n for n in lengths if n]
        return cls(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), max(lengths, default=0))

    def to(self, device: torch.device) -> Documents:
        return self._replace(bounds=self.bounds.to(device, non_blocking=True))

    def numbers(self, batch: int, positions: int) -> Tensor:
        """int64[B S]: which document each token belongs to."""
        ends = self.bounds[1:].to(torch.int64)
        return torch.bucketize(torch.arange(batch * positions, device=ends.device), ends, right=True).view(batch, positions)

    def mask(self, batch: int, positions: int) -> Tensor:
        """bool[B 1 S S], true where query and key are of one document: for back ends that take a mask."""
        numbers_BS = self.numbers(batch, positions)
        return numbers_BS[:, None, :, None] == numbers_BS[:, None, None, :]
