"""A quantile of a bf16 tensor, which PyTorch computes for fp32 and fp64 only."""

import sys

import torch


def clip(x):
    values = x.float() if "repaired" in sys.argv else x
    return x.clamp(max=torch.quantile(values.abs(), 0.99).item())


clip(torch.randn(32, dtype=torch.bfloat16))
