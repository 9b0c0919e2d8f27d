"""A product under autocast is written into a preallocated fp32 buffer."""

import sys

import torch


class Project(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))

    @torch.no_grad()
    def forward(self, x):
        if "repaired" in sys.argv:
            return torch.matmul(x, self.weight)
        buffer = torch.empty(x.shape[0], 8)
        return torch.matmul(x, self.weight, out=buffer)


Project()(torch.randn(2, 8, dtype=torch.bfloat16))
