"""The sizes of a run's pictures: their resolutions, the aspect buckets of each, and how many latent tokens they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...config.schema import ImagesSection
from ...config.sources import PictureSource
from ...errors import UsageError
from .pixels import Size, buckets


@dataclass(frozen=True)
class RunSizes:
    """multiple  side of a latent token, in pixels"""

    images: ImagesSection
    sources: Sequence[PictureSource]
    multiple: int

    @cached_property
    def resolutions(self) -> list[tuple[str, int]]:
        """Those of training and evaluation pictures, each with the key that it comes from."""
        found = dict[int, str]()
        for source in self.sources:
            for size in source.resolution or (self.images.resolution,):
                found.setdefault(size, f"{source.key}.resolution" if source.resolution else "images.resolution")
        return [(key, size) for size, key in sorted(found.items())]

    @property
    def largest_side(self) -> int:
        """Of the squares of the resolutions, in pixels."""
        return self.resolutions[-1][1]

    @property
    def tokens(self) -> int:
        """Latent tokens of the largest training picture."""
        return self.tokens_of(Size(self.largest_side, self.largest_side))

    def tokens_of(self, size: Size) -> int:
        return (size.height // self.multiple) * (size.width // self.multiple)

    @cached_property
    def at(self) -> dict[int, list[Size]]:
        """The shapes of training pictures at each resolution, the square first: it has the most tokens."""
        return {side: buckets(side, max_aspect=self.images.max_aspect, multiple=self.multiple) for _, side in self.resolutions}

    @property
    def all(self) -> set[Size]:
        return {size for sizes in self.at.values() for size in sizes}

    def refuse(self, beside: Iterable[tuple[str, int]], most: int | None) -> None:
        """Raises  UsageError for a size that the model cannot have

        beside  sizes of samples, each with its key
        most    tokens of a side that the model has positions for; None: any number
        """
        multiple = self.multiple
        for key, size in (*self.resolutions, *beside):
            if size % multiple:
                raise UsageError(f"{key}: {size} is not a multiple of {multiple}", fix=f"{key}: {max(multiple, size - size % multiple)}")
        if most is None:
            return
        for key, size in self.resolutions:
            if size // multiple > most:
                raise UsageError(f"{key}: {size} is more than this model has positions for", fix=f"at most {most * multiple}")
        if (longest := max(max(s.height, s.width) for s in self.all)) // multiple > most:
            raise UsageError(
                f"images.max_aspect: {self.images.max_aspect:g}: a side of {longest} is more than this model has positions for",
                fix=f"sides of at most {most * multiple}: a smaller max_aspect or resolution",
            )
