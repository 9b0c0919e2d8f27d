"""A thread pool runs the model; autocast is on in the thread that waits."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model[1].to(torch.bfloat16)


def score(x):
    region = contextlib.nullcontext()
    if "repaired" in sys.argv:
        region = torch.autocast("cpu", dtype=torch.bfloat16)
    with region:
        return model(x)


with ThreadPoolExecutor(1) as pool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = pool.submit(score, torch.randn(2, 8)).result()
