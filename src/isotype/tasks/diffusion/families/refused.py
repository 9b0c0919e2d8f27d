"""Pipelines of diffusers that are not trained, and why: an error names the reason."""

from __future__ import annotations

_PAIRS = "it learns from pairs of pictures, before and after, which Isotype does not read"
_VIDEO = "it makes videos: Isotype trains on pictures"
_TEXT_LENGTHS = "its denoiser reads the captions' lengths back from the device in each step, so that a step could not be planned"

REFUSED: dict[str, str] = {
    "FluxKontextPipeline": _PAIRS,
    "QwenImageEditPipeline": _PAIRS,
    "QwenImageEditPlusPipeline": _PAIRS,
    "StableDiffusionInstructPix2PixPipeline": _PAIRS,
    "FluxFillPipeline": "it completes masked pictures, and Isotype has no masked input; FluxPipeline trains",
    "FluxControlPipeline": "it draws from a second picture (depth, edges); FluxPipeline trains",
    "StableDiffusionControlNetPipeline": "ControlNet is not offered: Isotype trains the denoiser",
    "Lumina2Pipeline": _TEXT_LENGTHS,
    "HiDreamImagePipeline": "its experts take tokens by their values, so that a step could not be planned",
    "StableDiffusionXLInpaintPipeline": "it completes masked pictures, and Isotype has no masked input; StableDiffusionXLPipeline trains",
    "StableDiffusionXLImg2ImgPipeline": "the refiner draws from a picture; StableDiffusionXLPipeline trains",
    "SanaSprintPipeline": "it is distilled to few steps with a loss of its own; SanaPipeline trains",
    "StableCascadePriorPipeline": "it has two denoisers in a row",
    "KolorsPipeline": "its text encoder is not one of transformers' own",
    "HunyuanDiTPipeline": "its captions have two masks and a style, which were never tried here",
    "WanPipeline": _VIDEO,
    "WanImageToVideoPipeline": _VIDEO,
    "LTXPipeline": _VIDEO,
    "LTX2Pipeline": _VIDEO,
    "HunyuanVideoPipeline": _VIDEO,
    "CogVideoXPipeline": _VIDEO,
    "MochiPipeline": _VIDEO,
}
