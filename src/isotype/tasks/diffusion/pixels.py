"""A picture file as the tensor that a VAE takes, as a viewer shows it: EXIF rotation, alpha on white, CMYK, 16 bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .windows import Window

WHITE = (255, 255, 255)
_ORIENTATION = 0x0112  # EXIF; from 5 on width and height are exchanged


class BadPicture(ValueError):
    """A file that is not a complete picture, with the reason in one line."""


def _why(error: Exception) -> str:
    return f"not a whole picture: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def opened(content: bytes) -> Any:
    """A PIL image in RGB. Raises BadPicture."""
    from PIL import Image, ImageOps

    try:
        image: Any = Image.open(io.BytesIO(content))
        image.load()
        image = ImageOps.exif_transpose(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(_why(error)) from None
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        grey = np.asarray(image, dtype=np.float64)
        top = 65535.0 if image.mode.startswith("I") else max(1.0, float(grey.max()))
        image = Image.fromarray(np.clip(grey / top * 255.0 + 0.5, 0, 255).astype(np.uint8))
    if image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*WHITE, 255))
        image = Image.alpha_composite(ground, image)
    return image.convert("RGB")


def shown_size(content: bytes) -> tuple[int, int]:
    """Width and height as a viewer shows the picture, from its header. Raises BadPicture."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.height, image.width) if turned else (image.width, image.height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(_why(error)) from None


def pixels(content: bytes, window: Window) -> Tensor:
    """fp32[3 H W] in [-1, 1]: scaled to cover the window's size, what is over is cut off. Raises BadPicture."""
    levels_HWC = np.array(_fitted(opened(content), window))
    return torch.from_numpy(levels_HWC).permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0


def mask_pixels(content: bytes, window: Window) -> Tensor:
    """fp32[1 H W] in [0, 1], of a grey picture: 1 where it is white. Raises BadPicture, also where nothing is white."""
    mask = np.array(_fitted(opened(content).convert("L"), window), dtype=np.float32) / 255.0
    if not mask.any():
        raise BadPicture("the mask is black all over: nothing would be learnt")
    return torch.from_numpy(mask)[None]


def _fitted(image: Any, window: Window) -> Any:
    from PIL import Image, ImageOps

    size = (window.size.width, window.size.height)
    return ImageOps.fit(image, size, method=Image.Resampling.LANCZOS, centering=(window.left, window.top))


def as_png(picture_CHW: Tensor) -> bytes:
    """The PNG of fp32[3 H W] in [-1, 1]."""
    from PIL import Image

    levels = ((picture_CHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(levels).save(out, format="PNG")
    return out.getvalue()
