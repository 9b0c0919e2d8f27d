"""A picture file as the tensor that a VAE takes, as a viewer shows it: EXIF rotation, alpha on white, CMYK, 16 bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

WHITE = (255, 255, 255)


class BadPicture(ValueError):
    """A file that is not a complete picture, with the reason in one line."""


def opened(content: bytes) -> Any:
    """A PIL image in RGB. Raises BadPicture."""
    from PIL import Image, ImageOps

    try:
        image: Any = Image.open(io.BytesIO(content))
        image.load()
        image = ImageOps.exif_transpose(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(f"not a whole picture: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
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


def pixels(content: bytes, *, resolution: int) -> Tensor:
    """fp32[3 resolution resolution] in [-1, 1]: scaled to cover the square, its middle taken. Raises BadPicture."""
    from PIL import Image, ImageOps

    image = ImageOps.fit(opened(content), (resolution, resolution), method=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0


def as_png(picture_CHW: Tensor) -> bytes:
    """The PNG of fp32[3 H W] in [-1, 1]."""
    from PIL import Image

    levels = ((picture_CHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    out = io.BytesIO()
    Image.fromarray(levels).save(out, format="PNG")
    return out.getvalue()
