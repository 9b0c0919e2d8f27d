"""Computes the sizes of a run's pictures and the windows to which they are cropped.

Each picture is assigned to a bucket of pictures with a similar aspect ratio. All pictures of a
bucket are scaled and cropped to the same size.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...config.schema import ImagesSection
from ...config.sources import PictureSource
from ...data.pictures import BadPicture
from ...errors import UsageError

# The side of a bucket is a multiple of a step. The step is the resolution divided by this number,
# rounded down to a multiple of the pixels per token of the model
_STEPS_PER_SIDE = 16


@dataclass(frozen=True, order=True)
class Size:
    """The size of a picture in pixels."""

    height: int
    width: int

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def sides(self) -> tuple[int, ...]:
        """Returns the height and the width, or only one number for a square."""
        return tuple(dict.fromkeys((self.height, self.width)))

    @classmethod
    def parse(cls, value: Any) -> Size | None:
        """Reads the side of a square (`768`), or width and height (`832x1216`), in pixels. Returns
        None for any other value.
        """
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or isinstance(value, bool):
            return None
        width = int(match["width"])
        return cls(int(match["height"] or width), width)

    def __str__(self) -> str:
        """Returns width x height, the order of the settings and of `parse`."""
        return f"{self.width} x {self.height}"


_SIZE = re.compile(r"(?P<width>[1-9]\d{0,5})(\s*[xX*]\s*(?P<height>[1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Window:
    """The part of a picture that becomes a training picture of this size. The picture is scaled so
    that it just covers the window. It is then longer than the window in one direction at most.

    x_share, y_share  the position of the window in the scaled picture, from 0 (left, top) to 1
                      (right, bottom)
    """

    size: Size
    x_share: float = 0.5
    y_share: float = 0.5


def bucket_sizes(resolution: int, *, max_aspect: float, multiple: int) -> list[Size]:
    """Returns the picture sizes of the buckets, one for each aspect ratio. The square is the first.
    All sides are multiples of `multiple`, and no area is larger than `resolution` squared.

    resolution  the side of a square picture, in pixels
    max_aspect  the largest ratio of the longer to the shorter side
    multiple    the side of a latent token, in pixels
    """
    step = max(multiple, resolution // _STEPS_PER_SIDE // multiple * multiple)
    square = Size(resolution, resolution)
    sizes = {square}
    for width in range(step, int(resolution * math.sqrt(max_aspect)) + 1, step):
        height = int(resolution**2 / width) // step * step
        if height and max(width, height) / min(width, height) <= max_aspect:
            sizes.add(Size(height, width))
            sizes.add(Size(width, height))
    return [square, *sorted(sizes - {square})]


class LatentSize(NamedTuple):
    """The size of a square picture or clip: its side in pixels, and its number of latent frames."""

    side: int
    frames: int


@dataclass(frozen=True)
class RunSizes:
    """The sizes of the pictures of a run.

    multiple    the side of a latent token, in pixels
    frame_step  the number of frames of a clip that the VAE combines into one latent frame
    """

    images: ImagesSection
    sources: Sequence[PictureSource]
    multiple: int
    frame_step: int = 1

    @cached_property
    def resolutions(self) -> list[tuple[str, int]]:
        """The resolutions of the training and evaluation pictures in ascending order. Each is
        (name of the setting that contains it, side of a square picture).
        """
        key_by_side = dict[int, str]()
        for source in self.sources:
            for side in source.resolution or (self.images.resolution,):
                key_by_side.setdefault(
                    side, f"{source.key}.resolution" if source.resolution else "images.resolution"
                )
        return [(key, side) for side, key in sorted(key_by_side.items())]

    @cached_property
    def largest(self) -> LatentSize:
        """The size of the square picture or clip with the most latent tokens."""
        sizes = [
            LatentSize(side, self.count_latent_frames(source.frames))
            for source in self.sources
            for side in source.resolution or (self.images.resolution,)
        ]
        default = LatentSize(self.images.resolution, self.count_latent_frames(self.images.frames))
        return max(sizes, key=lambda size: size.frames * size.side**2, default=default)

    @property
    def tokens(self) -> int:
        """The number of latent tokens of the largest training picture or clip."""
        side = self.largest.side
        return self.count_tokens(Size(side, side), self.largest.frames)

    def count_tokens(self, size: Size, latent_frames: int) -> int:
        frame_tokens = (size.height // self.multiple) * (size.width // self.multiple)
        return latent_frames * frame_tokens

    def count_latent_frames(self, frames: int) -> int:
        """Returns the number of latent frames of a clip. The VAE encodes the first frame alone."""
        return (frames - 1) // self.frame_step + 1

    @cached_property
    def buckets(self) -> dict[int, list[Size]]:
        """Maps the side of each resolution to the sizes of its buckets. The square comes first, and
        has the most tokens.
        """
        return {
            side: bucket_sizes(side, max_aspect=self.images.max_aspect, multiple=self.multiple)
            for _, side in self.resolutions
        }

    @property
    def all_sizes(self) -> set[Size]:
        return {size for sizes in self.buckets.values() for size in sizes}

    def check_sizes(
        self, sample_sides: Iterable[tuple[str, int]], max_side_tokens: int | None
    ) -> None:
        """Raises UsageError if the model does not support one of the sizes.

        sample_sides     sides of samples in pixels, as (name of the setting, side)
        max_side_tokens  the largest number of tokens per side for which the model has positions;
                         None for no limit
        """
        multiple = self.multiple
        for key, side in (*self.resolutions, *sample_sides):
            if side % multiple:
                raise UsageError(
                    f"{key}: {side} is not a multiple of {multiple}",
                    fix=f"{key}: {max(multiple, side - side % multiple)}",
                )
        if max_side_tokens is None:
            return
        for key, side in self.resolutions:
            if side // multiple > max_side_tokens:
                raise UsageError(
                    f"{key}: {side} is more than this model has positions for",
                    fix=f"at most {max_side_tokens * multiple}",
                )
        longest = max(max(size.height, size.width) for size in self.all_sizes)
        if longest // multiple > max_side_tokens:
            raise UsageError(
                f"images.max_aspect: {self.images.max_aspect:g}: a side of {longest} is more than"
                " this model has positions for",
                fix=(
                    f"sides of at most {max_side_tokens * multiple}: a smaller max_aspect or"
                    " resolution"
                ),
            )


def nearest_bucket(width: int, height: int, sizes: Sequence[Size]) -> Size:
    """Returns the bucket whose aspect ratio is nearest to the aspect ratio of a picture. The
    logarithms of width / height are compared. If two buckets are equally near, returns the larger
    bucket.
    """
    aspect = math.log(width / height)
    return min(
        sizes,
        key=lambda size: (round(abs(math.log(size.width / size.height) - aspect), 9), -size.area),
    )


def crop_windows(
    size: Size, crop: Literal["center"] | int, *, seed: int, content_hash: str
) -> list[Window]:
    """Returns the windows of a picture, which are the parts that are used for training. Random
    windows depend only on the seed and on the picture's content.

    crop          "center" for one window in the middle, or the number of random windows
    content_hash  a hash of the picture's file
    """
    if crop == "center":
        return [Window(size)]
    digest = hashlib.sha256(f"crop:{seed}:{content_hash}".encode()).digest()
    random_draws = random.Random(int.from_bytes(digest[:8], "big"))
    return [Window(size, random_draws.random(), random_draws.random()) for _ in range(crop)]


def have_same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Returns True if two pictures have the same aspect ratio. A difference of one pixel is
    allowed. The arguments are the widths and heights of the pictures.
    """
    (width, height), (other_width, other_height) = first, second
    return abs(width * other_height - other_width * height) <= max(width, height)


def require_same_shape(edited: tuple[int, int], original: tuple[int, int]) -> None:
    """Raises BadPicture if the two pictures of an edit have different aspect ratios, because both
    are scaled to the same window. The arguments are the widths and heights of the pictures.
    """
    if not have_same_shape(edited, original):
        raise BadPicture(
            f"{edited[0]} x {edited[1]} pixels, and the picture before the edit has {original[0]} x"
            f" {original[1]}: cut one to the other's shape"
        )


WIDEST_REFERENCE = 8.0  # the largest aspect ratio at which a reference picture is not cropped


def reference_window(width: int, height: int, *, side: int, multiple: int) -> Window:
    """Returns the window of a reference picture whose aspect ratio differs from that of the edited
    picture. Its size is that of the bucket with the nearest aspect ratio. Its area is at most that
    of a square with sides of `side` pixels.

    multiple  the side of a latent token, in pixels
    """
    square_side = max(multiple, side // multiple * multiple)
    sizes = bucket_sizes(square_side, max_aspect=WIDEST_REFERENCE, multiple=multiple)
    return Window(nearest_bucket(width, height, sizes))


def size_and_crop(width: int, height: int, window: Window, *, is_mirrored: bool) -> Tensor:
    """Returns the original size and the crop of a picture in pixels, fp32[4], on which SDXL is
    conditioned. The values are the height and the width of the picture, and the top and the left
    edge of its window in the scaled picture. The scaled picture may be mirrored.
    """
    size = window.size
    # the picture is scaled to the window's height, so that only its width exceeds the window
    if width * size.height >= height * size.width:
        vertical_room = 0
        horizontal_room = width * size.height // height - size.width
    else:
        vertical_room = height * size.width // width - size.height
        horizontal_room = 0
    left_offset = round(horizontal_room * window.x_share)
    return torch.tensor(
        [
            height,
            width,
            round(vertical_room * window.y_share),
            horizontal_room - left_offset if is_mirrored else left_offset,
        ],
        dtype=torch.float32,
    )
