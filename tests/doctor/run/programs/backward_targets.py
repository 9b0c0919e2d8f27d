"""Integer ratings in a loss whose forward accepts them and whose backward does not."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Linear(8, 1)
x, ratings = torch.randn(3, 8), torch.tensor([1, 5, 3])
if "repaired" in sys.argv:
    ratings = ratings.to(torch.float32)
loss = F.huber_loss(model(x).squeeze(-1), ratings)
loss.backward()
