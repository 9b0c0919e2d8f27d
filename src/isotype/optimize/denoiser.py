"""The parts of diffusers' transformers that have ops: blocks, adaptive norms, attention, activations."""

from __future__ import annotations

import torch
from torch import nn

from ..placement import Placement
from ..precision.apply import denoiser_blocks
from . import joint_attention, modulation, streams

OPS = ("gated", "modulation")


def is_denoiser(model: nn.Module) -> bool:
    return bool(denoiser_blocks(model))


def place(path: str, module: nn.Module, out_dtype: torch.dtype | None) -> list[Placement]:
    """What became of this module of the model; nothing for one that is no such part."""
    if streams.is_candidate(module):
        return streams.place(path, module, out_dtype)
    if modulation.is_candidate(module):
        return modulation.place(path, module, out_dtype)
    if joint_attention.is_candidate(module):
        return [joint_attention.place(path, module)]
    return [streams.place_activation(path, module)] if streams.is_activation(module) else []
