"""Pixels are cast to the dtype of mixed precision before a frozen encoder, which is kept in fp32.
Only the trained model runs under autocast, whose dtype is a variable.
"""

import sys

import torch
from torch import nn


def main(mixed_precision="fp16"):
    weight_dtype = {"fp16": torch.float16}[mixed_precision]
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3)).requires_grad_(False)
    denoiser = nn.Conv2d(4, 4, 3)
    pixels = torch.rand(1, 3, 8, 8).to(weight_dtype)
    if "repaired" in sys.argv:
        pixels = pixels.to(torch.float32)
    latents = encoder(pixels)
    with torch.autocast("cpu", dtype=weight_dtype):
        denoiser(latents).float().mean().backward()


main()
