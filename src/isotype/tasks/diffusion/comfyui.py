"""An adapter as the file that ComfyUI, kohya's tools and their like read.

ComfyUI takes a LoRA's alpha from tensors named `MODULE.alpha` only, and 1 times the product of the matrices without one: the file that
diffusers reads, whose alpha is in its metadata, would act there at rank / alpha of its strength. A U-Net's modules have kohya's names
(`lora_unet_down_blocks_0_...`), a transformer's those of diffusers after `transformer.`, which ComfyUI maps to its own.

Source  ComfyUI's comfy/lora.py and comfy/weight_adapter/lora.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import UsageError
from .families import Family

FILE = "comfyui.safetensors"
_PEFT_PREFIX = "base_model.model."
_UNET = {"lora_A": "lora_down", "lora_B": "lora_up"}


def write_comfyui(adapter: Path, out: Path, family: Family) -> int:
    """Writes the adapter of a PEFT folder to the file `out`; returns the number of its modules.

    Raises  UsageError for a family whose adapters ComfyUI does not read
    """
    refuse_unread(family)
    tensors = comfyui_tensors(adapter, family)
    save_file(tensors, out, metadata={"format": "pt", "pipeline": family.pipeline})
    return sum(name.endswith(".alpha") for name in tensors)


def refuse_unread(family: Family) -> None:
    """Raises  UsageError for a family whose adapters ComfyUI does not read"""
    if family.not_in_comfyui:
        raise UsageError(f"comfyui: {family.pipeline}: {family.not_in_comfyui}", fix="pytorch_lora_weights.safetensors, in diffusers")


def comfyui_tensors(adapter: Path, family: Family) -> dict[str, Tensor]:
    """name -> F[r in], F[out r] of each module and its alpha, F[]; F is the dtype of the adapter: a program multiplies by alpha / r."""
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    if settings.get("alpha_pattern") or settings.get("use_dora"):
        what = "alpha_pattern" if settings.get("alpha_pattern") else "use_dora"
        raise UsageError(f"comfyui: {adapter}: {what} of adapter_config.json is not offered")
    made: dict[str, Tensor] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, side = name.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if family.denoiser == "unet":
            module, side = f"lora_unet_{module.replace('.', '_')}", _UNET[side]
        else:
            module = f"{family.denoiser}.{module}"
        made[f"{module}.{side}.weight"] = tensor
        if side in ("lora_A", "lora_down"):
            rank = len(tensor)
            alpha = settings["lora_alpha"] * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)
            made[f"{module}.alpha"] = torch.tensor(alpha, dtype=tensor.dtype)
    return made
