"""Two arguments of a frozen bf16 model are fp32; only the trained model runs under autocast."""

import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from diffusers import SD3Transformer2DModel
from torch import nn

AcceleratorState._reset_state(reset_partial_state=True)  # of programs in the same process
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
denoiser = SD3Transformer2DModel(
    sample_size=4,
    patch_size=1,
    in_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=16,
    caption_projection_dim=16,
    pooled_projection_dim=16,
    out_channels=4,
)
denoiser.requires_grad_(False).to(torch.bfloat16)
control = accelerator.prepare(nn.Conv2d(4, 4, 1))
words, pooled = torch.randn(1, 3, 16), torch.randn(1, 16)
if "repaired" in sys.argv:
    words, pooled = words.to(torch.bfloat16), pooled.to(torch.bfloat16)
noisy = control(torch.randn(1, 4, 4, 4)).to(torch.bfloat16)
denoiser(
    hidden_states=noisy,
    timestep=torch.tensor([100]),
    encoder_hidden_states=words,
    pooled_projections=pooled,
)
