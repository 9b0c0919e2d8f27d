"""transformers 5.23.0, LT008: V-JEPA 2 makes its rotary frequencies in the dtype of the queries: how far the rotation is off."""

import torch
from transformers.models.vjepa2.modeling_vjepa2 import rotate_queries_or_keys

torch.manual_seed(0)
x = torch.randn(1, 1, 64, 32).bfloat16()
positions = torch.arange(64)
low = rotate_queries_or_keys(x, positions).double()
high = rotate_queries_or_keys(x.double(), positions)
print("largest error", (low - high).abs().max().item(), "one rounding of the output", (high.bfloat16().double() - high).abs().max().item())
