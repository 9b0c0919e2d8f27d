"""One file a family of diffusers' models: what its denoiser is given and gives."""

from __future__ import annotations

from .auraflow import AuraFlow
from .chroma import Chroma
from .family import Asked, Family
from .flux import Flux
from .flux2 import Flux2, Flux2Klein
from .pixart import PixArtAlpha, PixArtSigma
from .qwen_image import QwenImage
from .refused import REFUSED
from .sana import Sana
from .sd3 import SD3
from .sdxl import SDXL
from .stable_diffusion import StableDiffusion
from .z_image import ZImage

FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family
    for family in (
        Flux, Flux2, Flux2Klein, QwenImage, ZImage, Chroma, SD3, SDXL, StableDiffusion, Sana, AuraFlow, PixArtAlpha, PixArtSigma,
    )
}  # fmt: skip

__all__ = ["FAMILIES", "REFUSED", "Asked", "Family"]
