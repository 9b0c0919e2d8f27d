"""Describes the model families of diffusers, with the inputs and outputs of each family's denoiser."""

from __future__ import annotations

from .edits import Flux2Edit, Flux2KleinEdit, FluxKontext, QwenImageEdit, QwenImageEditPlus
from .ernie_image import ErnieImage
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
from .ideogram4 import Ideogram4
from .kandinsky5 import Kandinsky5
from .krea2 import Krea2
from .longcat_image import LongCatImage
from .ltx2 import LTX2
from .noise import SDXL, PixArtAlpha, PixArtSigma, StableDiffusion
from .video import LTX, Wan, WanHighNoise, WanLowNoise

# class of the diffusers pipeline -> the code for its models
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
        Krea2,
        ErnieImage,
        Ideogram4,
        LongCatImage,
        Kandinsky5,
        Wan,
        LTX,
        LTX2,
    )
}

EDIT_FAMILIES: dict[str, type[Family]] = {
    family.pipeline: family for family in (Flux2Edit, Flux2KleinEdit)
}
"""For pipelines that are trained on captions or on pairs: the family for a run on pairs."""

EXPERT_FAMILIES: dict[str, dict[str, type[Family]]] = {
    Wan.pipeline: {"high_noise": WanHighNoise, "low_noise": WanLowNoise},
}
"""For pipelines that may have a denoiser for high noise levels and one for low noise levels: the
family of each, by the value of `diffusion.expert`.
"""

__all__ = [
    "EDIT_FAMILIES",
    "EXPERT_FAMILIES",
    "FAMILIES",
    "REFUSED",
    "Conditioning",
    "Denoiser",
    "Family",
    "SampleSettings",
]
