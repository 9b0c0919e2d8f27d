"""Computes the sizes of a run's pictures, and converts a picture file to a tensor for a VAE.

Each picture is assigned to a bucket of pictures with a similar aspect ratio, and cropped to
windows. The pixels of the picture have the same values as in an image viewer. The EXIF rotation and
the colour profile are applied, and transparent parts are white. Pictures in CMYK and pictures with
16 bits per channel are converted too.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...config.schema import ImagesSection
from ...config.sources import PictureSource
from ...data.pictures import BadPicture, bad_picture_reason, open_picture, readable_phone_formats
from ...errors import UsageError

MIN_SIDE = 16  # the smallest side of a training picture, in pixels
THUMBNAIL_SIDE = 192  # the longer side of a picture in the report, in pixels
# a bucket's sides are multiples of one 16th of the resolution, rounded to a multiple of the number
# of pixels per token of the model
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
        return f"{self.height} x {self.width}"


_SIZE = re.compile(r"(?P<width>[1-9]\d{0,5})(\s*[xX*]\s*(?P<height>[1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Window:
    """The part of a picture that is scaled to `size`.

    x_share, y_share  the position of the window if the picture is larger than the window, from 0
                      (left, top) to 1 (right, bottom)
    """

    size: Size
    x_share: float = 0.5
    y_share: float = 0.5


def bucket_sizes(resolution: int, *, max_aspect: float, multiple: int) -> list[Size]:
    """Returns the picture sizes of the buckets, one for each aspect ratio. The square is the first.
    All sides are multiples of `multiple`, and no area is larger than `resolution` squared.

    multiple  the number of pixels per token of the model in each direction
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
        """The resolutions of the training and evaluation pictures in ascending order. Each comes
        with the name of the setting that contains it.
        """
        key_by_side = dict[int, str]()
        for source in self.sources:
            for size in source.resolution or (self.images.resolution,):
                key_by_side.setdefault(
                    size, f"{source.key}.resolution" if source.resolution else "images.resolution"
                )
        return [(key, size) for size, key in sorted(key_by_side.items())]

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
        """Returns the sizes of the buckets for each resolution. The square comes first, and has the
        most tokens.
        """
        return {
            side: bucket_sizes(side, max_aspect=self.images.max_aspect, multiple=self.multiple)
            for _, side in self.resolutions
        }

    @property
    def all_sizes(self) -> set[Size]:
        return {size for sizes in self.buckets.values() for size in sizes}

    def check_sizes(
        self, sample_sizes: Iterable[tuple[str, int]], max_side_tokens: int | None
    ) -> None:
        """Raises UsageError if the model does not support one of the sizes.

        sample_sizes     sizes of samples, each with the name of its setting
        max_side_tokens  the largest number of tokens per side for which the model has positions;
                         None for no limit
        """
        multiple = self.multiple
        for key, size in (*self.resolutions, *sample_sizes):
            if size % multiple:
                raise UsageError(
                    f"{key}: {size} is not a multiple of {multiple}",
                    fix=f"{key}: {max(multiple, size - size % multiple)}",
                )
        if max_side_tokens is None:
            return
        for key, size in self.resolutions:
            if size // multiple > max_side_tokens:
                raise UsageError(
                    f"{key}: {size} is more than this model has positions for",
                    fix=f"at most {max_side_tokens * multiple}",
                )
        if (
            longest := max(max(s.height, s.width) for s in self.all_sizes)
        ) // multiple > max_side_tokens:
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
    size: Size, crop: Literal["center"] | int, *, seed: int, content: str
) -> list[Window]:
    """Returns the windows of a picture, which are the parts that are used for training. Random
    windows depend only on the seed and on the picture's content.
    """
    if crop == "center":
        return [Window(size)]
    digest = hashlib.sha256(f"crop:{seed}:{content}".encode()).digest()
    random_draws = random.Random(int.from_bytes(digest[:8], "big"))
    return [Window(size, random_draws.random(), random_draws.random()) for _ in range(crop)]


# the EXIF tag of the orientation; its values from 5 on exchange width and height
_ORIENTATION = 0x0112


def displayed_size(content: bytes) -> tuple[int, int]:
    """Returns the width and the height of a picture as an image viewer shows it. They are read from
    the file's header. Raises BadPicture.
    """
    from PIL import Image

    readable_phone_formats()
    try:
        with Image.open(io.BytesIO(content)) as image:
            is_rotated = image.getexif().get(_ORIENTATION, 1) >= 5
            if is_rotated:
                return (image.height, image.width)
            return (image.width, image.height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(bad_picture_reason(error, content)) from None


@contextmanager
def label_control_errors(number: int = 0) -> Iterator[None]:
    """If a BadPicture is raised within this block, adds to its message that the error is in a
    picture before the edit.

    number  the number of this picture, if there are several; counted from 1
    """
    label = f"picture {number} before the edit" if number else "the picture before the edit"
    try:
        yield
    except BadPicture as error:
        raise BadPicture(f"{label}: {error}") from None


def have_same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Returns True if two pictures have the same aspect ratio. A difference of one pixel is
    allowed. The arguments are the widths and heights of the pictures.
    """
    (width, height), (other_width, other_height) = first, second
    return abs(width * other_height - other_width * height) <= max(width, height)


def refuse_other_shape(edited: tuple[int, int], original: tuple[int, int]) -> None:
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
    picture. The window keeps the aspect ratio of the reference picture as closely as the sizes of
    buckets allow, and is not larger than a square with sides of `side` pixels.

    multiple  the side of a latent token, in pixels
    """
    square_side = max(multiple, side // multiple * multiple)
    sizes = bucket_sizes(square_side, max_aspect=WIDEST_REFERENCE, multiple=multiple)
    return Window(nearest_bucket(width, height, sizes))


def open_displayed(content: bytes) -> Any:
    """Opens a picture as a PIL image in RGB, with sRGB colours, as an image viewer shows it. Raises
    BadPicture.
    """
    return open_picture(content, to_srgb=True)


def pixels(content: bytes, window: Window) -> Tensor:
    """Reads a picture as fp32[3 H W] in [-1, 1]. The picture is scaled so that it covers the
    window, and then cropped to the window. Raises BadPicture.
    """
    return _image_pixels(open_displayed(content), window)


def clip_pixels(images: Iterable[Any], window: Window) -> Tensor:
    """Reads a clip as fp32[3 F H W] in [-1, 1]. Each frame is scaled and cropped like a picture.

    images  the frames as PIL images in RGB
    Raises  BadPicture if the frames have different sizes
    """
    frames = []
    size = None
    for number, image in enumerate(images, start=1):
        size = size or image.size
        if image.size != size:
            raise BadPicture(
                f"frame {number} has {image.width} x {image.height} pixels, and the first frame has"
                f" {size[0]} x {size[1]}"
            )
        frames.append(_image_pixels(image, window))
    return torch.stack(frames, dim=1)


def _image_pixels(image: Any, window: Window) -> Tensor:
    if min(image.size) < MIN_SIDE:
        raise BadPicture(
            f"{image.width} x {image.height} pixels: too small to learn from, at least {MIN_SIDE} a"
            " side"
        )
    levels_HWC = np.array(_fit_to_window(image, window))
    return torch.from_numpy(levels_HWC).permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0


def size_and_crop(width: int, height: int, window: Window, *, is_mirrored: bool) -> Tensor:
    """Returns the original size and the crop of a picture in pixels, fp32[4]. The values are the
    height and the width of the picture, and the top and the left edge of its window in the scaled
    picture. The scaled picture may be mirrored.
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


def mask_pixels(content: bytes, window: Window) -> Tensor:
    """Reads a mask from a grey picture. Returns fp32[1 H W] with values in [0, 1], where 1 is
    white. Raises BadPicture if the picture cannot be used, or if the mask is completely black.
    """
    mask = (
        np.array(_fit_to_window(open_picture(content).convert("L"), window), dtype=np.float32)
        / 255.0
    )
    if not mask.any():
        raise BadPicture("the mask is black all over: nothing would be learnt")
    return torch.from_numpy(mask)[None]


def _fit_to_window(image: Any, window: Window) -> Any:
    from PIL import Image, ImageOps

    size = (window.size.width, window.size.height)
    return ImageOps.fit(
        image, size, method=Image.Resampling.LANCZOS, centering=(window.x_share, window.y_share)
    )


def encode_png(picture_CHW: Tensor) -> bytes:
    """Encodes a picture fp32[3 H W] in [-1, 1] as PNG."""
    buffer = io.BytesIO()
    _to_image(picture_CHW).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_webp(clip_CFHW: Tensor, frame_rate: float) -> bytes:
    """Encodes a clip fp32[3 F H W] in [-1, 1] as an animated WebP, which repeats."""
    first, *others = (_to_image(frame_CHW) for frame_CHW in clip_CFHW.unbind(1))
    buffer = io.BytesIO()
    first.save(
        buffer,
        format="WEBP",
        save_all=True,
        append_images=others,
        duration=round(1000 / frame_rate),
        loop=0,
        quality=90,
        method=4,
    )
    return buffer.getvalue()


def _to_image(picture_CHW: Tensor) -> Any:
    from PIL import Image

    levels_CHW = ((picture_CHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(levels_CHW.permute(1, 2, 0).cpu().numpy())


def thumbnail_url(content: bytes) -> str:
    """Scales a picture down so that its longer side has THUMBNAIL_SIDE pixels, and returns it as a
    data URL. Raises BadPicture.
    """
    image = open_displayed(content)
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
