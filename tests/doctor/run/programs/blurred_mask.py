"""A mask is blurred with a kernel that is built in the default dtype, once for each direction."""

import sys

import torch
import torch.nn.functional as F

torch.manual_seed(0)


def blur(mask, width):
    distance = torch.arange(width) - (width - 1) / 2
    kernel = torch.exp(-(distance**2) / width)
    kernel = kernel / kernel.sum()
    rows = mask.unsqueeze(1)
    if "repaired" in sys.argv:
        kernel = kernel.to(rows.dtype)
    rows = F.conv2d(rows, kernel.view(1, 1, 1, -1))
    rows = F.conv2d(rows, kernel.view(1, 1, -1, 1))
    return rows.squeeze(1)


print(blur(torch.rand(2, 8, 8), 3).shape)
print(blur(torch.rand(2, 8, 8).half(), 3).shape)
