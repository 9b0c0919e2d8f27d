"""Programs that break the declaration by arithmetic in forward: products, sums, tables, scales, the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .program import program
from .tiny import HIDDEN, MLP, Attention, Block, Rotary, Tiny, tiny


class Fp64ThenFp16MLP(MLP):
    """Multiplies in fp64, then in fp16, and casts back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = F.silu(x.double() @ self.up.weight.double().t())
            return (h.half() @ self.down.weight.half().t()).to(x.dtype)


class Fp16MLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return in_fp16(self, x)


def in_fp16(mlp: MLP, x: Tensor) -> Tensor:
    torch.clear_autocast_cache()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        return MLP.forward(mlp, x.half()).to(x.dtype)


class Fp32MLP(MLP):
    """Products wider than `compute`, narrowed again where they leave."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(F.silu(F.linear(x.float(), self.up.weight)), self.down.weight).to(x.dtype)


class EinsumMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = torch.einsum("bth,fh->btf", x.float(), self.up.weight.float())
        return self.down(F.silu(h).to(x.dtype))


class Fp32Convolution(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            mixed = self.mix(x.float().transpose(1, 2)).transpose(1, 2)
        return super().forward(mixed.to(x.dtype))


class Fp16Scores(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            scores = q.half() @ k.half().transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.float().masked_fill(~mask, -1e4).softmax(-1).to(v.dtype) @ v


class NarrowSoftmax(Attention):
    """softmax in bf16, and fp32 from there on."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, -1e4).softmax(-1).float()
        return weights.to(v.dtype) @ v


class NarrowLogSoftmax(Attention):
    """log_softmax in bf16, and fp32 from there on."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, -1e4).log_softmax(-1).float().exp().to(v.dtype) @ v


class WrittenOutSoftmax(Attention):
    """The same from exp and a sum."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = (e / e.sum(-1, keepdim=True)).float()
        return weights.to(v.dtype) @ v


class Fp32Attention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)


class NarrowScale(Attention):
    """The scale of the scores from a sum of squares in bf16, widened afterwards."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.full((q.shape[-1],), 1.1, dtype=torch.bfloat16).pow(2).sum().rsqrt().float()
        return F.scaled_dot_product_attention((q.float() * scale).to(q.dtype), k, v, is_causal=True)


class InlineNorm(MLP):
    """Normalises its input in bf16, in no norm module, and goes on in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True).float()
        return super().forward((x.float() / (scale + 1e-6).sqrt()).to(x.dtype))


class NarrowVariance(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.float() / (x.var(-1, keepdim=True).float() + 1e-6).sqrt()).to(x.dtype))


class NarrowPooling(MLP):
    """Adds the mean over all positions, summed in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.float() + 0.1 * x.mean(1, keepdim=True).float()).to(x.dtype))


class NarrowRunningSum(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.float() + 0.01 * x.cumsum(1).float()).to(x.dtype))


class Int8Activations(MLP):
    """Activations pass through int8."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax().float() / 127
        small = (x.float() / scale).round().clamp(-127, 127).to(torch.int8)
        return super().forward((x.float() + (small.float() * scale - x.float()).detach()).to(x.dtype))


class Rounded(MLP):
    """Replaces its result by values on a grid, as the straight-through estimator of a quantisation does."""

    def grid(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (self.grid(y.detach()) - y).detach()


class ByFloorDivision(Rounded):
    def grid(self, x: Tensor) -> Tensor:
        return (x // 0.01) * 0.01


class ByRemainder(Rounded):
    def grid(self, x: Tensor) -> Tensor:
        return x - x % 0.01


class ByFmod(Rounded):
    def grid(self, x: Tensor) -> Tensor:
        return x - x.fmod(0.02)


class ByCastIntegers(Rounded):
    def grid(self, x: Tensor) -> Tensor:
        return (x * 128).int().to(x.dtype) / 128


class ByDividedIntegers(Rounded):
    def grid(self, x: Tensor) -> Tensor:
        return (x * 128).int() / 128


class Fp8Activations(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float8_e4m3fn).to(x.dtype))


class SumOfProducts(MLP):
    """A matrix product written as a multiplication and a sum, in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        h = (x.half().unsqueeze(-2) * self.up.weight.half()).sum(-1)
        return self.down(self.act(h.to(x.dtype)))


class NarrowTable(Rotary):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[1]).to(torch.bfloat16), self.inv_freq.bfloat16())
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float().to(x.dtype), angles.sin().float().to(x.dtype)


class Fp16Table(Rotary):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            angles = (torch.arange(x.shape[1]).half()[:, None] * self.inv_freq.half()).float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class ComplexTable(Rotary):
    """Tables from complex numbers of two fp64."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.inv_freq)
        turns = torch.polar(torch.ones_like(angles).double(), torch.cat([angles], -1).double())
        turns = torch.cat([turns, turns], -1)
        return turns.real.to(x.dtype), turns.imag.to(x.dtype)


class ScaledEmbedding(Tiny):
    """The embedding is scaled in fp64."""

    def embedded(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return (x.double() * HIDDEN**0.5).to(x.dtype)


class Fp16Softcap(Tiny):
    def scores(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return (torch.tanh(y.half() / 30) * 30).to(y.dtype)


class NarrowAuxiliaryLoss(Tiny):
    """Log-probabilities inside the model, in bf16, whose mean is added to the logits."""

    def scores(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return y + 1e-3 * y.log_softmax(-1).mean(-1, keepdim=True)


class WideBlock(Block):
    """The residual stream goes on in fp32."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.float()
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


def wide_residual() -> Tiny:
    torch.manual_seed(0)
    model = Tiny()
    model.layers = nn.ModuleList(WideBlock() for _ in range(2))
    return model


class RecomputedInFp16(MLP):
    """The first forward is right; the one that backward asks for takes its input through fp16."""

    def forward(self, x: Tensor) -> Tensor:
        calls = []

        def inner(x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 1:
                return MLP.forward(self, x)
            return MLP.forward(self, (x.half() * 1).to(x.dtype))

        return checkpoint(inner, x, use_reentrant=False, determinism_check="none")


def narrow_loss(run) -> None:
    """The loss in bf16, widened at the end."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logp = logits.bfloat16().log_softmax(-1)
        picked = logp.flatten(0, 1).gather(1, labels.clamp(min=0).flatten()[:, None]).squeeze(1)
        return -(picked * (labels.flatten() >= 0)).sum().float()

    run.loss = loss


def narrow_written_out_loss(run) -> None:
    """logsumexp from exp and a sum, in bf16."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        z = logits.bfloat16().flatten(0, 1)
        lse = z.exp().sum(-1).log()
        picked = z.gather(1, labels.clamp(min=0).flatten()[:, None]).squeeze(1)
        return ((lse - picked).float() * (labels.flatten() >= 0)).sum()

    run.loss = loss


TABLE = torch.linspace(-1, 1, 256)


class ByTable(MLP):
    """Each value becomes the nearest of 256, as the straight-through estimator of a quantisation does."""

    def index(self, x: Tensor) -> Tensor:
        return ((x.detach() + 1) * 127.5).long().clamp(0, 255)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (TABLE.to(y.dtype)[self.index(y.float())] - y).detach()


class ByBins(ByTable):
    def index(self, x: Tensor) -> Tensor:
        return torch.bucketize(x.detach(), TABLE).clamp(max=255)


class ByNearest(ByTable):
    def index(self, x: Tensor) -> Tensor:
        return (x.detach()[..., None] - TABLE).abs().argmin(-1)


class ByOneHot(ByNearest):
    """The same, read by a product with a row of zeros and a one."""

    def forward(self, x: Tensor) -> Tensor:
        y = MLP.forward(self, x)
        chosen = F.one_hot(self.index(y.float()), len(TABLE)).float() @ TABLE
        return y + (chosen.to(y.dtype) - y).detach()


class ByIntegers(MLP):
    """Integers in a product with a number: widened without a cast."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + ((y.detach().float() * 127).to(torch.int16) * (1 / 127) - y.detach()).to(y.dtype)


class ByLargeConstant(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).float() + 49152.0 - 49152.0).to(x.dtype)


for made in (
    ByTable, ByBins, ByNearest, ByOneHot, ByIntegers, ByLargeConstant,
    Fp64ThenFp16MLP, Fp16MLP, Fp32MLP, EinsumMLP, Fp32Convolution, InlineNorm, NarrowVariance, NarrowPooling, NarrowRunningSum,
    Int8Activations, ByFloorDivision, ByRemainder, ByFmod, ByCastIntegers, ByDividedIntegers, Fp8Activations, SumOfProducts,
    RecomputedInFp16,
):  # fmt: skip
    program(made.__name__, lambda made=made: tiny(mlp=made))
for made in (Fp16Scores, NarrowSoftmax, NarrowLogSoftmax, WrittenOutSoftmax, Fp32Attention, NarrowScale):
    program(made.__name__, lambda made=made: tiny(attention=made))
for made in (NarrowTable, Fp16Table, ComplexTable):
    program(made.__name__, lambda made=made: tiny(rotary=made))
for made in (ScaledEmbedding, Fp16Softcap, NarrowAuxiliaryLoss):
    program(made.__name__, made)
program("wide_residual", wide_residual)
program("narrow_loss", tiny, prepare=narrow_loss)
program("narrow_written_out_loss", tiny, prepare=narrow_written_out_loss)
