"""Converts picture files to tensors for a VAE, and tensors to picture files.

The pixels of a picture have the same values as in an image viewer. The EXIF rotation and the colour
profile are applied, and transparent parts are white. Pictures in CMYK and pictures with 16 bits per
channel are converted too.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.pictures import BadPicture, bad_picture_reason, open_picture, register_phone_formats
from .picture_sizes import Window

MIN_SIDE = 16  # the smallest side of a training picture, in pixels
THUMBNAIL_SIDE = 192  # the longer side of a picture in the report, in pixels


# the EXIF tag of the orientation; its values from 5 on exchange width and height
_ORIENTATION = 0x0112


def displayed_size(content: bytes) -> tuple[int, int]:
    """Returns the width and the height of a picture as an image viewer shows it. They are read from
    the file's header. Raises BadPicture.
    """
    from PIL import Image

    register_phone_formats()
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
    """Within this block, a control picture is read, which is a picture before the edit. If
    BadPicture is raised, this function adds to the message that the error is in this picture.

    number  the number of the control picture, counted from 1; 0 if there is only one
    """
    label = f"picture {number} before the edit" if number else "the picture before the edit"
    try:
        yield
    except BadPicture as error:
        raise BadPicture(f"{label}: {error}") from None


def open_displayed(content: bytes) -> Any:
    """Opens a picture as a PIL image in RGB, with sRGB colours, as an image viewer shows it. Raises
    BadPicture.
    """
    return open_picture(content, to_srgb=True)


def read_pixels(content: bytes, window: Window) -> Tensor:
    """Reads a picture as fp32[3 H W] in [-1, 1]. The picture is scaled so that it covers the
    window, and then cropped to the window. Raises BadPicture.
    """
    return _image_pixels(open_displayed(content), window)


def read_clip_pixels(images: Iterable[Any], window: Window) -> Tensor:
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


def read_mask_pixels(content: bytes, window: Window) -> Tensor:
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
