"""The second run of a selective checkpoint casts a weight that forward had in autocast's cache."""

import sys
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

SAVED = {torch.ops.aten.addmm.default, torch.ops.aten._to_copy.default}


def choose(context, operator, *args, **kwargs):
    is_saved = operator in SAVED
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def branch(self, x):
        return torch.tanh(self.shared(x))

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, choose)
        for _ in range(2):
            x = x + checkpoint(self.branch, x, use_reentrant=False, context_fn=contexts)
        return x


model = Branches()
keeps_copies = "repaired" not in sys.argv
with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=keeps_copies):
    loss = model(torch.randn(2, 8)).float().sum()
loss.backward()
