"""An fp32 matrix meets bf16 targets in a function of torch that has no bf16 kernel."""

import sys

import torch
from torch import nn


def fit(features, targets):
    wide = features.float()
    gram = wide.T @ wide + torch.eye(features.shape[1])
    if "repaired" in sys.argv:
        return torch.linalg.solve(gram, (features.T @ targets).float())
    return torch.linalg.solve(gram, features.T @ targets)


model = nn.Linear(6, 4).to(torch.bfloat16)
with torch.no_grad():
    features = model(torch.randn(8, 6, dtype=torch.bfloat16))
fit(features, torch.randn(8, 2).to(torch.bfloat16))
