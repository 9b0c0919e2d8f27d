"""peft 0.21.2, LT016: the lines of `ArrowLoraLinearLayer.forward` (arrow.py:248) that meet two dtypes under autocast."""

import torch

tokens, prototypes = torch.randn(4, 8), torch.randn(2, 8)
with torch.autocast("cpu", dtype=torch.bfloat16):
    similarity = torch.abs(tokens @ prototypes.T)
    top, index = torch.topk(similarity, 1, dim=1)
    tokens.new_full((4, 2), float("-inf")).scatter_(1, index, top)
