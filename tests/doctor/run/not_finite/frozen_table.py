"""A pretrained table has NaN in a row that is used at the second step."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
table = torch.randn(10, 4)
if "repaired" not in sys.argv:
    table[7] = float("nan")
model = nn.Sequential(nn.Embedding.from_pretrained(table, freeze=True), nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model[1].parameters())
for ids in ([1, 2], [3, 7]):
    loss = model(torch.tensor(ids)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
