"""What a denoiser is given: rows of the data with the numbers drawn for them, as tensors.

Everything drawn for a row is a function of the seed and of its position in the stream. So 4 x 2 rows are the same as 1 x 8, a resumed run
draws what the undisturbed one did, and nothing that happens between steps changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...training.feed import RowStream


@dataclass(frozen=True)
class Row:
    """Keys of the store. `mirrored`: of the mirrored picture's latents; None where pictures are not mirrored."""

    latents: str
    mirrored: str | None
    text: str


@dataclass(frozen=True)
class Placed:
    """A row where the stream handed it out."""

    row: Row
    position: int


@dataclass(frozen=True)
class Batch:
    """latents, noise  F[N C H W]   `precision.latents`
    sigma           F[N]         the same
    text            tensors of the family, [N ...] each
    """

    latents: Tensor
    noise: Tensor
    sigma: Tensor
    text: dict[str, Tensor]

    @property
    def rows(self) -> int:
        return len(self.latents)

    @property
    def weight(self) -> int:
        return self.rows

    @property
    def units(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"{self.rows} pictures of {' x '.join(map(str, self.latents.shape[1:]))} latents"

    def to(self, device: torch.device) -> Batch:
        move = {name: tensor.to(device, non_blocking=True) for name, tensor in self.text.items()}
        latents, noise, sigma = (t.to(device, non_blocking=True) for t in (self.latents, self.noise, self.sigma))
        return Batch(latents, noise, sigma, move)


class PictureStream(RowStream[Row]):
    """Rows with their positions; the position is the whole state, as in any stream of rows."""

    def take(self, count: int) -> list[Placed]:  # type: ignore[override]  # rows with their place
        first = self.position
        return [Placed(row, first + i) for i, row in enumerate(super().take(count))]


def generator_of(purpose: str, seed: int, position: int) -> torch.Generator:
    """The generator of one row."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{position}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def stacked(latents: Sequence[Tensor], noise: Sequence[Tensor], sigma: Sequence[float], text: Sequence[dict[str, Tensor]],
            *, dtype: torch.dtype) -> Batch:  # fmt: skip
    """Rows as a batch."""
    return Batch(
        torch.stack(list(latents)).to(dtype), torch.stack(list(noise)).to(dtype), torch.tensor(list(sigma), dtype=torch.float64).to(dtype),
        {name: torch.stack([one[name] for one in text]) for name in text[0]},
    )  # fmt: skip
