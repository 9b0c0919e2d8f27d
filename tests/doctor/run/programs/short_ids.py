"""A dataset keeps its token ids in int16, which an embedding does not take."""

import sys

import numpy as np
import torch
from torch import nn

TOKENS = np.arange(8, dtype=np.int16)


def read_tokens(start):
    return torch.from_numpy(TOKENS[start : start + 4])


tokens = torch.stack([read_tokens(0), read_tokens(4)])
if "repaired" in sys.argv:
    tokens = tokens.long()
nn.Embedding(16, 8)(tokens).sum().backward()
