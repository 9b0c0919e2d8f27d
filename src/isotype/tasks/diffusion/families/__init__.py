"""One file a family of diffusers' models: what its denoiser is given and gives."""

from __future__ import annotations

from .family import Asked, Family
from .flux import Flux
from .pixart import PixArtAlpha, PixArtSigma
from .qwen_image import QwenImage
from .sd3 import SD3
from .sdxl import SDXL

FAMILIES: dict[str, type[Family]] = {family.pipeline: family for family in (SD3, Flux, PixArtAlpha, PixArtSigma, SDXL, QwenImage)}

__all__ = ["FAMILIES", "Asked", "Family"]
