"""What the denoiser of each family of diffusers' models is given and gives."""

from __future__ import annotations

from .family import REFUSED, Asked, Family
from .flow import SD3, AuraFlow, Chroma, Flux, Flux2, Flux2Klein, QwenImage, Sana, ZImage
from .noise import SDXL, PixArtAlpha, PixArtSigma, StableDiffusion

FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family
    for family in (
        Flux, Flux2, Flux2Klein, QwenImage, ZImage, Chroma, SD3, SDXL, StableDiffusion, Sana, AuraFlow, PixArtAlpha, PixArtSigma,
    )
}  # fmt: skip

__all__ = ["FAMILIES", "REFUSED", "Asked", "Family"]
