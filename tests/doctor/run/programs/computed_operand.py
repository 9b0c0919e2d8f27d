"""The operand of an operator without a bf16 kernel is computed in the failing line. The operator
after it has no bf16 kernel either.
"""

import sys

import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.kernel = nn.Parameter(torch.randn(8, 2))

    def forward(self, x):
        if "repaired" in sys.argv:
            spectrum = torch.fft.rfft(self.inner(x).float(), dim=1)
            return spectrum * torch.view_as_complex(self.kernel.float())
        spectrum = torch.fft.rfft(self.inner(x), dim=1)
        return spectrum * torch.view_as_complex(self.kernel)


Mixer().to(torch.bfloat16)(torch.randn(2, 4, 8, dtype=torch.bfloat16))
