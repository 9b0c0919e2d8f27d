"""A table of complex rotations is built while bf16 is the default dtype."""

import sys

import torch


def rotation_table(length, width):
    angles = torch.outer(torch.linspace(0, 1, length), torch.linspace(1, 2, width))
    if "repaired" in sys.argv:
        angles = angles.float()
    return torch.polar(torch.ones_like(angles), angles)


torch.set_default_dtype(torch.bfloat16)
try:
    rotation_table(4, 2)
finally:
    torch.set_default_dtype(torch.float32)
