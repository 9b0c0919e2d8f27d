"""The result of a method is bf16 and is converted to a NumPy array."""

import sys

import torch


class Trainer:
    def gather(self, values):
        return values

    def log(self, rewards):
        if "repaired" in sys.argv:
            rewards = rewards.float()
        rewards = self.gather(rewards).cpu().numpy()
        return rewards.mean()


Trainer().log(torch.ones(3, dtype=torch.bfloat16))
