"""One file a family of diffusers' models: what its denoiser is given and gives."""

from __future__ import annotations

from .family import Family
from .flux import Flux
from .sd3 import SD3

FAMILIES: dict[str, type[Family]] = {family.pipeline: family for family in (SD3, Flux)}

__all__ = ["FAMILIES", "Family"]
