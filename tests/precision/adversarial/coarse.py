"""Programs that round without a cast and without a rounding operator: their values are few, or use few bits."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import Rounded
from .program import program
from .tiny import HIDDEN, MLP, tiny


class Thermometer(Rounded):
    """Counts the thresholds below each value."""

    def grid(self, y: Tensor) -> Tensor:
        return (y[..., None] > torch.arange(-1, 1, 0.01)).sum(-1) * 0.01 - 1


class VeltkampSplit(Rounded):
    """The high part of each value, by products and differences alone."""

    def grid(self, y: Tensor) -> Tensor:
        c = y * 65537.0
        return c - (c - y)


class LargeBuffer(Rounded):
    """Adds and subtracts a large constant that is a tensor of the values' own shape."""

    def grid(self, y: Tensor) -> Tensor:
        big = torch.full_like(y, 49152.0)
        return (y + big) - big


class LowHalves(Rounded):
    """Clears the low half of each value through a view of its memory."""

    def grid(self, y: Tensor) -> Tensor:
        z = y.clone()
        z.view(torch.bfloat16)[..., ::2] = 0
        return z


class TwoLevels(Rounded):
    def grid(self, y: Tensor) -> Tensor:
        m = y.abs().mean()
        return torch.where(y > 0, m, -m)


class Drawn(Rounded):
    def grid(self, y: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid(y))


class Counted(Rounded):
    def grid(self, y: Tensor) -> Tensor:
        return (torch.histc(y, 64, -1, 1).cumsum(0) / y.numel())[:HIDDEN].expand_as(y)


class Ranks(Rounded):
    """The rank of each value in its row."""

    def grid(self, y: Tensor) -> Tensor:
        return y.argsort(-1).argsort(-1).to(y.dtype) / HIDDEN


class SignsOfWeights(MLP):
    """Weights of one bit: their sign, and the mean of their size."""

    def one_bit(self, w: Tensor) -> Tensor:
        return w + (w.sign() * w.abs().mean() - w).detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.act(F.linear(x, self.one_bit(self.up.weight))), self.down.weight)


class LowBytes(Rounded):
    """Clears the last byte of each value in place."""

    def grid(self, y: Tensor) -> Tensor:
        z = y.clone()
        z.view(torch.uint8)[..., ::4] = 0
        return z


class Divided(Rounded):
    """Rounds by a division that truncates."""

    def grid(self, y: Tensor) -> Tensor:
        return torch.div(y, 0.001, rounding_mode="trunc") * 0.001


class LargeVector(Rounded):
    """Adds and subtracts a large constant for each channel."""

    def grid(self, y: Tensor) -> Tensor:
        large = torch.linspace(12000.0, 13000.0, y.shape[-1], dtype=y.dtype)
        return (y + large) - large


class HalfComplex(Rounded):
    def grid(self, y: Tensor) -> Tensor:
        return torch.complex(y, y).to(torch.complex32).to(torch.complex64).real


class WholeNumbersThroughAList(Rounded):
    """Only integers leave PyTorch, and come back as numbers of a list."""

    def grid(self, y: Tensor) -> Tensor:
        return torch.tensor((y * 4096).to(torch.int16).tolist()).to(y.dtype) / 4096


class OneAtATime(Rounded):
    """Each value becomes a number of its own, is packed into half precision, and is written back."""

    def grid(self, y: Tensor) -> Tensor:
        packed = torch.empty_like(y).flatten()
        for i, value in enumerate(y.flatten()):
            packed[i] = struct.unpack("e", struct.pack("e", value.item()))[0]
        return packed.view_as(y)


class NarrowNumber(MLP):
    """A scale of one number, stored in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


COARSE = (
    Thermometer, VeltkampSplit, LargeBuffer, LowHalves, TwoLevels, Drawn, Counted, Ranks, SignsOfWeights, WholeNumbersThroughAList,
    OneAtATime,
)  # fmt: skip
for made in (*COARSE, LowBytes, Divided, LargeVector, HalfComplex, NarrowNumber):
    program(made.__name__, lambda made=made: tiny(mlp=made), preset="fp32")
