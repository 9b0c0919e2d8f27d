"""An audio model in bf16 computes a spectrum, whose signal and window must be fp32."""

import sys

import torch
from torch import nn


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, signal):
        window = self.window
        if "repaired" in sys.argv:
            signal, window = signal.float(), window.float()
        return torch.stft(signal, 16, window=window, return_complex=True).abs()


Spectrum().bfloat16()(torch.ones(2, 64, dtype=torch.bfloat16))
