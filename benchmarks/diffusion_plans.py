"""The memory plan of real diffusion architectures, from their configurations alone: no weights, no download.

    python benchmarks/diffusion_plans.py FOLDER     # writes pipelines' folders without weights; isotype plan takes them

Source  the `transformer/config.json` files of black-forest-labs/FLUX.1-dev, stabilityai/stable-diffusion-3.5-large and Qwen/Qwen-Image
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel

from isotype.config.load import load
from isotype.environment.hardware import detect
from isotype.tasks.diffusion.denoiser import built, quantised_layers
from isotype.tasks.diffusion.families import Family
from isotype.tasks.diffusion.families.flow import SD3, Flux, QwenImage
from isotype.training.memory.outline import quantise_outline
from isotype.training.memory.plan import held_bytes
from isotype.training.setup import resolve_precision

FLUX_DEV = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
}  # fmt: skip
SD35_LARGE = {
    "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 38, "attention_head_dim": 64, "num_attention_heads": 38,
    "joint_attention_dim": 4096, "caption_projection_dim": 2432, "pooled_projection_dim": 2048, "out_channels": 16,
    "pos_embed_max_size": 192, "qk_norm": "rms_norm",
}  # fmt: skip
QWEN_IMAGE = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any], Family]] = {
    "FLUX.1-dev": (FluxTransformer2DModel, FLUX_DEV, Flux()),
    "stable-diffusion-3.5-large": (SD3Transformer2DModel, SD35_LARGE, SD3()),
    "Qwen-Image": (QwenImageTransformer2DModel, QWEN_IMAGE, QwenImage()),
}
_FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
_VAE = {"_class_name": "AutoencoderKL", "latent_channels": 16, "block_out_channels": [128, 256, 512, 512]}


def held(name: str, preset: str) -> tuple[int, int, int]:
    """(all weights, trained weights, held bytes) of a LoRA of rank 16 on every linear layer of the blocks."""
    kind, settings, family = ARCHITECTURES[name]
    loaded = load(None, [f"precision.preset={preset}", "adapter.r=16", "model.device=cpu"])
    precision = resolve_precision(loaded.config, loaded.sources, detect("cpu")).precision
    with torch.device("meta"):
        denoiser = kind(**settings)
        total = sum(p.numel() for p in denoiser.parameters())
        if precision.base == "nf4":
            quantise_outline(denoiser, torch.bfloat16, layers=set(quantised_layers(denoiser, family, precision).values()))
        model, _ = built(denoiser, family, loaded.config, precision, device_type="cuda")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return total, trained, held_bytes(model, loaded.config.train, precision)


def write_folder(folder: Path, name: str) -> Path:
    """A pipeline's folder with its configurations only."""
    kind, settings, family = ARCHITECTURES[name]
    pooled = {"text_encoder": ["transformers", "CLIPTextModel"], "text_encoder_2": ["transformers", "T5EncoderModel"]}
    index = {"_class_name": family.pipeline, "transformer": ["diffusers", kind.__name__], "vae": ["diffusers", "AutoencoderKL"]}
    parts = {part: pooled.get(part, ["transformers", "CLIPTokenizer"]) for part in family.encoders}
    files = {
        "transformer/config.json": {"_class_name": kind.__name__, **settings}, "vae/config.json": _VAE,
        "scheduler/scheduler_config.json": {**_FLOW, "shift": 3.0},
        "model_index.json": {**index, **parts, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]},
    }  # fmt: skip
    for part in family.encoders:
        (folder / part).mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(json.dumps(content))
    return folder


def main() -> int:
    for name in ARCHITECTURES:
        for preset in ("bf16-lora", "nf4-lora"):
            total, trained, taken = held(name, preset)
            print(f"{name:28} {preset:10} {total / 1e9:7.3f} B weights, {trained / 1e6:6.1f} M trained, held {taken / 2**30:6.2f} GiB")
    for name in ("FLUX.1-dev", "stable-diffusion-3.5-large") if len(sys.argv) > 1 else ():
        print(f"isotype plan: model.name: {write_folder(Path(sys.argv[1]) / name, name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
