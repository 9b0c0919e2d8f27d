"""A float average is written into integer counts in place."""

import sys

import torch

counts = torch.bincount(torch.tensor([0, 1, 1, 3]))
if "repaired" in sys.argv:
    counts = counts.float() * 0.9
else:
    counts *= 0.9
