"""Defines the rows of a diffusion run, the stream that yields them, and the batches that the
denoiser receives.

All random numbers of a row depend only on the seed and on the row's position in the stream. So 4
micro-batches of 2 rows have the same random numbers as 1 micro-batch of 8 rows. A resumed run has
the same random numbers as a run without an interruption. Nothing that happens between steps changes
the random numbers.
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
from .picture_sizes import Size

Shape = tuple[int | Size, ...]


@dataclass(frozen=True)
class Row:
    """A row of the data. It contains the keys of the row's latents and captions in the store. Each
    time the row is used, one window and one caption are chosen at random.

    latents   the key of the latents of each window
    mirrored  the keys of the windows' mirror images; empty if pictures are not mirrored
    text      the key of each caption
    size      the size of the windows in pixels
    weight    the factor by which the row's loss is multiplied
    empty     the key of the empty caption
    control_sizes  the sizes of the pictures before the edit in pixels
    latent_frames  the number of latent frames of a clip; 1 for a picture
    """

    latents: tuple[str, ...]
    mirrored: tuple[str, ...]
    text: tuple[str, ...]
    size: Size
    weight: float = 1.0
    empty: str = ""
    control_sizes: tuple[Size, ...] = ()
    latent_frames: int = 1

    @property
    def shape(self) -> Shape:
        """Returns the number of latent frames and the sizes of all pictures of the row. Rows of the
        same shape can be stacked to a batch.
        """
        return (self.latent_frames, self.size, *self.control_sizes)

    @property
    def area(self) -> int:
        """Returns the number of pixels of all latent frames and pictures of the row."""
        control_area = sum(size.area for size in self.control_sizes)
        return self.latent_frames * self.size.area + control_area


@dataclass(frozen=True)
class PlacedRow:
    """A row, with its position in the stream of training rows."""

    row: Row
    position: int


@dataclass(frozen=True)
class Batch:
    """A batch of pictures or clips of one size. Its loss is divided by their number, and the speed is
    also counted in them.

    latents, noise  F[N C H W]   in the dtype of `precision.latents`; F[N C F H W] for clips
    sigma           F[N]         noise levels, in the same dtype
    text            [N ...]      the text tensors of the model family, by name
    mask            F[N 1 H W]   where the loss of a picture is counted; None if it is counted
                    everywhere
    weights         F[N]         the factor of each picture's loss; None if all factors are 1
    crop            fp32[N 4]    the result of `picture_sizes.size_and_crop`; None if the pictures are not
                                 cropped and have the size of the latents
    lengths                      the number of tokens of each caption, if these numbers differ
    controls        F[N C H W]   latents of the pictures before the edit, one tensor for each
                                 picture of a row; empty if the model does not edit pictures
    """

    latents: Tensor
    noise: Tensor
    sigma: Tensor
    text: dict[str, Tensor]
    mask: Tensor | None = None
    weights: Tensor | None = None
    crop: Tensor | None = None
    lengths: tuple[int, ...] = ()
    controls: tuple[Tensor, ...] = ()

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
        noun = "clip" if self.latents.ndim == 5 else "picture"
        shape = " x ".join(map(str, self.latents.shape[1:]))
        return f"{pluralise(self.rows, noun)} of {shape} latents"

    def to(self, device: torch.device) -> Batch:
        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, tuple):
                return tuple(map(move, value))
            return value

        text = {name: move(tensor) for name, tensor in self.text.items()}
        return Batch(
            **{item.name: move(getattr(self, item.name)) for item in fields(self)} | {"text": text}
        )


Item = TypeVar("Item")


def group_by_shape(items: Iterable[Item], row_of: Callable[[Item], Row]) -> dict[Shape, list[Item]]:
    """Groups items by the shape of their rows. The groups are ordered by the positions of their
    first items.
    """
    groups: dict[Shape, list[Item]] = {}
    for item in items:
        groups.setdefault(row_of(item).shape, []).append(item)
    return groups


class PictureStream(RowStream[Row]):
    """Yields rows with their positions. The only state of the stream is its current position.

    step_rows  the number of rows of a step. All rows of a step have the same shape. Rows that do
               not fill a whole step with rows of their shape come at the end of an epoch
    """

    def __init__(
        self, rows: Sequence[Row], *, seed: int, shuffle: bool, step_rows: int = 1
    ) -> None:
        super().__init__(rows, seed=seed, shuffle=shuffle)
        self.step_rows = step_rows

    def _epoch_order(self, epoch: int) -> list[int]:
        order = super()._epoch_order(epoch)
        shapes = group_by_shape(order, lambda index: self.rows[index])
        if len(shapes) == 1:
            return order
        groups = []
        remaining = list[int]()
        for indices in shapes.values():
            full_count = len(indices) // self.step_rows * self.step_rows
            groups += [
                indices[i : i + self.step_rows] for i in range(0, full_count, self.step_rows)
            ]
            remaining += indices[full_count:]
        group_order = epoch_order(
            len(groups), seed=self.seed + 1, epoch=epoch, shuffle=self.shuffle
        )
        return [*(index for turn in group_order for index in groups[turn]), *remaining]

    def take(self, count: int) -> list[PlacedRow]:  # type: ignore[override]  # rows with their position
        first_position = self.position
        return [PlacedRow(row, first_position + i) for i, row in enumerate(super().take(count))]


def row_generator(purpose: str, seed: int, position: int) -> torch.Generator:
    """Returns the random generator of one row."""
    digest = hashlib.sha256(f"{purpose}:{seed}:{position}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class DrawnRow(NamedTuple):
    """A row with the random numbers that were drawn for it.

    latents, noise  fp32[C H W]; fp32[C F H W] for clips
    sigma           the noise level
    text            the outputs of the text encoders for the caption
    weight          the factor of the row's loss
    controls        fp32[C H W]  the latents of each picture before the edit
    mask            fp32[1 H W]
    crop            fp32[4]
    """

    latents: Tensor
    noise: Tensor
    sigma: float
    text: dict[str, Tensor]
    crop: Tensor
    mask: Tensor | None = None
    weight: float = 1.0
    controls: tuple[Tensor, ...] = ()


def stack_rows(
    rows: Sequence[DrawnRow], *, dtype: torch.dtype, keeps_text_lengths: bool = False
) -> Batch:
    """Stacks rows of one shape into a batch. If `keeps_text_lengths` is true, the texts are padded
    to the longest text, and a mask is added.
    """
    has_masks = any(row.mask is not None for row in rows)
    has_weights = any(row.weight != 1.0 for row in rows)
    masks = [torch.ones_like(row.latents[:1]) if row.mask is None else row.mask for row in rows]
    controls = zip(*(row.controls for row in rows), strict=True)
    texts: dict[str, Tensor] = {}
    for name in rows[0].text:
        values = [row.text[name] for row in rows]
        if name == "text" and keeps_text_lengths:
            texts |= _pad_texts(values)
        else:
            texts[name] = torch.stack(values)
    return Batch(
        torch.stack([row.latents for row in rows]).to(dtype),
        torch.stack([row.noise for row in rows]).to(dtype),
        torch.tensor([row.sigma for row in rows], dtype=torch.float64).to(dtype),
        texts,
        torch.stack(masks).to(dtype) if has_masks else None,
        torch.tensor([row.weight for row in rows], dtype=dtype) if has_weights else None,
        torch.stack([row.crop for row in rows]),
        tuple(len(row.text["text"]) for row in rows) if keeps_text_lengths else (),
        tuple(torch.stack(pictures).to(dtype) for pictures in controls),
    )


def _pad_texts(texts: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pads texts F[S D] to the length of the longest text.

    ->  `text` F[N S D], 0 after the end of a text; `mask` F[N S], 1 where there is a token
    """
    lengths = torch.tensor([len(text) for text in texts])
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    return {
        "text": padded,
        "mask": (torch.arange(padded.shape[1]) < lengths[:, None]).to(padded.dtype),
    }
