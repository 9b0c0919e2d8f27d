"""Rewards are Python integers, so their tensor has no mean."""

import sys

import torch


def advantages(texts):
    lengths = [len(text) for text in texts]
    if "repaired" in sys.argv:
        rewards = torch.tensor(lengths, dtype=torch.float32)
    else:
        rewards = torch.tensor(lengths)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


advantages(["a", "bb", "cccc"])
