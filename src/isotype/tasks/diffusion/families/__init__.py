"""Describes the model families of diffusers, with the inputs and outputs of each family's denoiser."""

from __future__ import annotations

from .edits import FluxKontext, QwenImageEdit, QwenImageEditPlus
from .family import REFUSED, Conditioning, Denoiser, Family, SampleSettings
from .flow import (
    SD3,
    AuraFlow,
    Chroma,
    Flux,
    Flux2,
    Flux2Klein,
    HiDream,
    Lumina2,
    QwenImage,
    Sana,
    ZImage,
)
from .noise import SDXL, PixArtAlpha, PixArtSigma, StableDiffusion
from .video import LTX, Wan

FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family
    for family in (
        Flux,
        FluxKontext,
        Flux2,
        Flux2Klein,
        QwenImage,
        QwenImageEdit,
        QwenImageEditPlus,
        ZImage,
        Chroma,
        SD3,
        SDXL,
        StableDiffusion,
        Sana,
        AuraFlow,
        Lumina2,
        HiDream,
        PixArtAlpha,
        PixArtSigma,
        Wan,
        LTX,
    )
}

__all__ = ["FAMILIES", "REFUSED", "Conditioning", "Denoiser", "Family", "SampleSettings"]
