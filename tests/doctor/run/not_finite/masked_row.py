"""The last sequence of a batch is all padding."""

import sys

import torch
from torch import nn

REPAIRED = "repaired" in sys.argv


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        mask = torch.arange(x.shape[1]) >= lengths[:, None]
        lowest = torch.finfo(x.dtype).min if REPAIRED else float("-inf")
        scores = self.score(x).squeeze(-1).masked_fill(mask, lowest)
        weights = torch.softmax(scores, dim=-1)
        return self.head((weights[:, :, None] * x).sum(1))


torch.manual_seed(0)
model = Pool()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for lengths in ([3, 5, 2], [4, 1, 5], [2, 4, 0]):
    logits = model(torch.randn(3, 5, 8), torch.tensor(lengths))
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
