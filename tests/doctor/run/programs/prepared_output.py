"""A model that accelerate prepared returns fp32; its output promotes the input of a bf16 decoder."""

import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import AutoencoderKL
from torch import nn


def build_decoder():
    return AutoencoderKL(
        block_out_channels=(4,),
        norm_num_groups=2,
        latent_channels=4,
        sample_size=4,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )


def sample(model, vae):
    latents = torch.randn(1, 4, 4, 4, dtype=vae.dtype)
    for _ in range(2):
        latents = latents - 0.4 * model(latents)
    latents = latents / vae.config.scaling_factor
    if "repaired" in sys.argv:
        latents = latents.to(vae.dtype)
    return vae.decode(latents, return_dict=False)[0]


AcceleratorState._reset_state(reset_partial_state=True)  # of programs in the same process
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
vae = build_decoder().to(torch.bfloat16)
with torch.no_grad():
    sample(accelerator.prepare(nn.Conv2d(4, 4, 1)), vae)
