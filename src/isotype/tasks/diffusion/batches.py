"""What a denoiser is given: rows of the data with the numbers drawn for them, as tensors.

Everything drawn for a row is a function of the seed and of its position in the stream. So 4 x 2
rows are the same as 1 x 8, a resumed run draws the same numbers as an uninterrupted one, and
nothing that happens between steps changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...data.rows import RowStream, epoch_order
from ...wording import pluralise
from .pixels import Size


@dataclass(frozen=True)
class Row:
    """Keys of the store; one of each kind is drawn each time: `latents` of each window, `mirrored`
    of its mirror image (empty where pictures are not mirrored), `text` of each caption. `empty`: of
    the empty caption. `weight`: of its loss.
    """

    latents: tuple[str, ...]
    mirrored: tuple[str, ...]
    text: tuple[str, ...]
    size: Size
    weight: float = 1.0
    empty: str = ""


@dataclass(frozen=True)
class PlacedRow:
    """A row with its position in the stream."""

    row: Row
    position: int


@dataclass(frozen=True)
class Batch:
    """Pictures of one size. Its weight, and its units for the speed, are its pictures.

    latents, noise  F[N C H W]   `precision.latents`
    sigma           F[N]         the same
    text            tensors of the family, [N ...] each
    mask            F[N 1 H W]   where the loss of a picture counts; None: everywhere
    weights         F[N]         of each picture's loss; None: 1
    crop            fp32[N 4]    of `pixels.size_and_crop`; None: whole pictures of the size of the latents
    lengths                      tokens of each caption, where they differ
    control         F[N C H W]   latents of the pictures before the edit; None: of a model that does
                    not edit
    """

    latents: Tensor
    noise: Tensor
    sigma: Tensor
    text: dict[str, Tensor]
    mask: Tensor | None = None
    weights: Tensor | None = None
    crop: Tensor | None = None
    lengths: tuple[int, ...] = ()
    control: Tensor | None = None

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
        return (
            f"{pluralise(self.rows, 'picture')} of {' x '.join(map(str, self.latents.shape[1:]))}"
            " latents"
        )

    def to(self, device: torch.device) -> Batch:
        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            return value

        text = {name: move(tensor) for name, tensor in self.text.items()}
        return Batch(
            **{item.name: move(getattr(self, item.name)) for item in fields(self)} | {"text": text}
        )


Item = TypeVar("Item")


def group_by_size(items: Iterable[Item], size_of: Callable[[Item], Size]) -> dict[Size, list[Item]]:
    """The things of each size, in the order of the first ones."""
    groups: dict[Size, list[Item]] = {}
    for item in items:
        groups.setdefault(size_of(item), []).append(item)
    return groups


class PictureStream(RowStream[Row]):
    """Rows with their positions; the position is the whole state, as in any stream of rows.

    step_rows  number of rows of a step. So many consecutive rows have the same size while there are
              enough; the others come last
    """

    def __init__(
        self, rows: Sequence[Row], *, seed: int, shuffle: bool, step_rows: int = 1
    ) -> None:
        super().__init__(rows, seed=seed, shuffle=shuffle)
        self.step_rows = step_rows

    def _epoch_order(self, epoch: int) -> list[int]:
        order = super()._epoch_order(epoch)
        sizes = group_by_size(order, lambda index: self.rows[index].size)
        if len(sizes) == 1:
            return order
        groups = []
        rest = list[int]()
        for indices in sizes.values():
            full = len(indices) // self.step_rows * self.step_rows
            groups += [indices[i : i + self.step_rows] for i in range(0, full, self.step_rows)]
            rest += indices[full:]
        turns = epoch_order(len(groups), seed=self.seed + 1, epoch=epoch, shuffle=self.shuffle)
        return [*(index for turn in turns for index in groups[turn]), *rest]

    def take(self, count: int) -> list[PlacedRow]:  # type: ignore[override]  # rows with their position
        first = self.position
        return [PlacedRow(row, first + i) for i, row in enumerate(super().take(count))]


def row_generator(purpose: str, seed: int, position: int) -> torch.Generator:
    """The generator of one row."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{position}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class DrawnRow(NamedTuple):
    """A row with what was drawn for it. latents, noise, control: fp32[C H W]; mask: fp32[1 H W] or
    None; cut: fp32[4].
    """

    latents: Tensor
    noise: Tensor
    sigma: float
    text: dict[str, Tensor]
    crop: Tensor
    mask: Tensor | None = None
    weight: float = 1.0
    control: Tensor | None = None


def stack_rows(
    rows: Sequence[DrawnRow], *, dtype: torch.dtype, keeps_text_lengths: bool = False
) -> Batch:
    """Rows of one size as a batch. `keeps_text_lengths`: texts are padded to the longest, and get a mask."""
    masked = any(row.mask is not None for row in rows)
    weighted = any(row.weight != 1.0 for row in rows)
    masks = [torch.ones_like(row.latents[:1]) if row.mask is None else row.mask for row in rows]
    controls = [row.control for row in rows if row.control is not None]
    return Batch(
        torch.stack([row.latents for row in rows]).to(dtype),
        torch.stack([row.noise for row in rows]).to(dtype),
        torch.tensor([row.sigma for row in rows], dtype=torch.float64).to(dtype),
        (
            _pad_texts([row.text["text"] for row in rows])
            if keeps_text_lengths
            else {name: torch.stack([row.text[name] for row in rows]) for name in rows[0].text}
        ),
        torch.stack(masks).to(dtype) if masked else None,
        torch.tensor([row.weight for row in rows], dtype=dtype) if weighted else None,
        torch.stack([row.crop for row in rows]),
        tuple(len(row.text["text"]) for row in rows) if keeps_text_lengths else (),
        torch.stack(controls).to(dtype) if controls else None,
    )


def _pad_texts(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """`text` F[N S D] of texts F[S D], zero behind a shorter one, and `mask` F[N S], 1 where there
    is a token.
    """
    lengths = torch.tensor([len(text) for text in texts])
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    return {
        "text": padded,
        "mask": (torch.arange(padded.shape[1]) < lengths[:, None]).to(padded.dtype),
    }
