"""Programs that break the declaration by what is stored: buffers, parametrised weights, caches, weights that leave PyTorch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .program import program
from .tiny import HIDDEN, MLP, WORDS, Attention, Tiny, TinyRMSNorm, tiny


def with_buffer_in(dtype: torch.dtype):
    def build() -> Tiny:
        model = tiny()
        model.rotary.inv_freq = model.rotary.inv_freq.to(dtype)
        return model

    return build


class Rounded(nn.Module):
    """A parametrisation that lets a weight pass through a narrower dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, w: Tensor) -> Tensor:
        return w.to(self.dtype).to(w.dtype)


class OnAGrid(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        scale = w.detach().abs().amax() / 7
        return w + (torch.round(w / scale) * scale - w).detach()


class FakeQuantised(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(w, 0.01, 0, -128, 127)


class WithoutLowBits(nn.Module):
    """Cuts a weight's last 16 bits off."""

    def forward(self, w: Tensor) -> Tensor:
        return w + ((w.detach().view(torch.int32) & -65536).view(torch.float32) - w).detach()


def parametrised(how: nn.Module):
    def build() -> Tiny:
        model = tiny()
        parametrize.register_parametrization(model.layers[1].mlp.up, "weight", how)
        return model

    return build


class ThroughNumpy(MLP):
    """The weight is rounded to fp16 in NumPy and comes back."""

    def forward(self, x: Tensor) -> Tensor:
        w = torch.from_numpy(self.up.weight.detach().numpy().astype(np.float16).astype(np.float32))
        return self.down(self.act(nn.functional.linear(x, w)))


class WrittenByNumpy(MLP):
    """NumPy writes into the weight's own memory."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.up.weight.detach().numpy()
        seen[...] = seen.astype(np.float16)
        return super().forward(x)


class HiddenWeight(MLP):
    """A weight in bf16 that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.randn(HIDDEN, HIDDEN).half()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.hidden[0].to(x.dtype)) * 0.1)


class RunningMean(MLP):
    """A running mean kept in bf16, used in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(HIDDEN, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running.mul_(0.99).add_(x.float().mean((0, 1)).to(torch.bfloat16), alpha=0.01)
        return super().forward((x.float() - self.running.float()).to(x.dtype))


class Fp64Bias(Attention):
    """Scores get a bias from an fp64 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.linspace(0, 1, 4, dtype=torch.float64)[:, None, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() - self.slopes * torch.arange(k.shape[2])
        return scores.softmax(-1).to(v.dtype) @ v


class Fp64Scales(nn.Embedding):
    """Its output is multiplied by an fp64 buffer."""

    def __init__(self) -> None:
        super().__init__(WORDS, HIDDEN)
        self.register_buffer("scales", torch.full((HIDDEN,), HIDDEN**0.5, dtype=torch.float64))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = super().forward(input_ids)
        return (x * self.scales).to(x.dtype)


class NarrowNorm(TinyRMSNorm):
    """Its variance is computed in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.bfloat16().pow(2).mean(-1, keepdim=True).float()
        return (self.weight * (x.float() * torch.rsqrt(variance + 1e-6))).to(x.dtype)


class Cached(Tiny):
    """Makes tokens with keys and values kept in a narrower dtype."""

    kept = torch.float8_e5m2

    def generate(self, input_ids: Tensor, tokens: int) -> Tensor:
        for _ in range(tokens):
            logits = self(input_ids).logits
            input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], 1)
        return input_ids


class CachedAttention(Attention):
    kept = torch.float8_e5m2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = k.to(self.kept), v.to(self.kept)
        return super().attend(q, *(t.to(q.dtype) for t in kept))


class Bf16CachedAttention(CachedAttention):
    kept = torch.bfloat16


class Int8CachedAttention(CachedAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = k.abs().amax(-1, keepdim=True) / 127
        small = (k / scale).to(torch.int8)
        return Attention.attend(self, q, small.to(k.dtype) * scale, v)


def cached(attention: type[nn.Module]):
    def build() -> Tiny:
        torch.manual_seed(0)
        model = Cached()
        model.layers[1].attention = attention()
        return model

    return build


def recast(run) -> None:
    weight = run.model.layers[0].mlp.up.weight
    weight.data = weight.data.bfloat16()


program("bf16_table_buffer", with_buffer_in(torch.bfloat16))
program("fp16_table_buffer", with_buffer_in(torch.float16))
program("bf16_parametrisation", parametrised(Rounded(torch.bfloat16)))
program("fp16_parametrisation", parametrised(Rounded(torch.float16)), preset="fp32")
program("weight_on_a_grid", parametrised(OnAGrid()))
program("fake_quantised_weight", parametrised(FakeQuantised()))
program("weight_without_low_bits", parametrised(WithoutLowBits()))
for made in (ThroughNumpy, WrittenByNumpy, HiddenWeight, RunningMean):
    program(made.__name__, lambda made=made: tiny(mlp=made))
program("Fp64Bias", lambda: tiny(attention=Fp64Bias))
program("Fp64Scales", lambda: tiny(embed=Fp64Scales))
program("NarrowNorm", lambda: tiny(norm=NarrowNorm))
program("fp8_cache", cached(CachedAttention), generate=True)
program("bf16_cache_of_fp32_generation", cached(Bf16CachedAttention), generate=True, preset="fp32")
program("int8_cache", cached(Int8CachedAttention), generate=True)
program("parameter_recast", tiny, prepare=recast)
