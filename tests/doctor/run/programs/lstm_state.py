"""A bf16 LSTM gets fp32 states. The message of oneDNN names no dtype."""

import sys

import torch
from torch import nn


def initial_state(batch):
    dtype = torch.bfloat16 if "repaired" in sys.argv else torch.get_default_dtype()
    if dtype == torch.bfloat16:
        return torch.zeros(1, batch, 4, dtype=dtype), torch.zeros(1, batch, 4, dtype=dtype)
    return torch.zeros(1, batch, 4), torch.zeros(1, batch, 4)


rnn = nn.LSTM(4, 4).to(torch.bfloat16)
state = initial_state(2)
rnn(torch.randn(3, 2, 4, dtype=torch.bfloat16), state)
