"""NumPy computes the returns of a rollout in float64; the loss fails in backward, in a sum of two."""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Rollout:
    def finish(self):
        rewards = np.linspace(0.0, 1.0, 4)
        self.returns = torch.from_numpy(np.cumsum(rewards))
        return torch.randn(4, 8), self.returns


def compute_losses(model, rollout):
    states, returns = rollout.finish()
    if "repaired" in sys.argv:
        returns = returns.to(torch.float32)
    values = model(states)[:, 0]
    value_loss = value_criterion(values, returns)
    return F.huber_loss(values, torch.zeros(4)), value_loss


model = nn.Linear(8, 1)
value_criterion = nn.HuberLoss()
rollout = Rollout()
policy_loss, value_loss = compute_losses(model, rollout)
(policy_loss + value_loss).backward()
