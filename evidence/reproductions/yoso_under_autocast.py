"""transformers 5.23.0, LT002: YOSO's hand-written backward, when forward ran under autocast."""

import torch
from transformers.models.yoso.modeling_yoso import YosoCumulation

q, k, v = (torch.randn(1, 4, 8, requires_grad=True) for _ in range(3))
mask = torch.ones(1, 4)
with torch.autocast("cpu", dtype=torch.bfloat16):
    out = YosoCumulation.apply(mask, mask, q, k, v, {"hash_code_len": 9})
out.float().sum().backward()
