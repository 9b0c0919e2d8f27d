"""A small causal model in plain PyTorch, whose parts the programs replace: embedding, norm,
attention with rotation, MLP, head.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, WORDS = 32, 4, 96


class TinyRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(
            x.dtype
        )


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = HIDDEN // HEADS
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size), persistent=False
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(x.shape[1], device=x.device)
        angles = torch.outer(positions.float(), self.inv_freq)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(HIDDEN, 3 * HIDDEN, bias=False),
            nn.Linear(HIDDEN, HIDDEN, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v)
        return self.out(y.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 64, bias=False), nn.Linear(64, HIDDEN, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = (
            TinyRMSNorm(),
            TinyRMSNorm(),
            Attention(),
            MLP(),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Tiny(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(WORDS, HIDDEN), Rotary()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = TinyRMSNorm(), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        x = self.embedded(input_ids)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return SimpleNamespace(logits=self.scores(self.norm(x)))

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(x)


def tiny(**parts: type[nn.Module]) -> Tiny:
    """A model with fixed weights; `mlp=Class` and the like replace that part of the last block."""
    torch.manual_seed(0)
    model = Tiny()
    for part, made in parts.items():
        owner = model if part in ("embed", "rotary", "norm", "head") else model.layers[-1]
        setattr(owner, part, made())
    return model
