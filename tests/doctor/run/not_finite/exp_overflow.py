"""The exponential of a large log-variance."""

import sys

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.decode = nn.Linear(4, 8)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        if "repaired" in sys.argv:
            log_variance = log_variance.clamp(max=20)
        deviation = torch.exp(0.5 * log_variance)
        return self.decode(mean + deviation * torch.randn_like(deviation))


torch.manual_seed(0)
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    loss = model(torch.randn(4, 8) * 100.0**step).tanh().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
