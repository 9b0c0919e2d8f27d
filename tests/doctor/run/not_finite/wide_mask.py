"""A mask with the smallest number of fp32 is cast to fp16, and masks a whole row."""

import sys

import torch
from torch import nn

dtype = torch.float16 if "repaired" in sys.argv else torch.float32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, x, keep):
        q, k = self.query(x), self.key(x)
        mask = torch.zeros(keep.shape[0], 1, keep.shape[1])
        mask = mask.masked_fill(~keep[:, None], torch.finfo(dtype).min)
        scores = q @ k.transpose(1, 2) + mask.to(q.dtype)
        return scores.float().softmax(-1) @ x.float()


torch.manual_seed(0)
model = Attention().half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(3):
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1, : 2 * step + 1] = False
    loss = model(torch.randn(2, 5, 8).half(), keep).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
