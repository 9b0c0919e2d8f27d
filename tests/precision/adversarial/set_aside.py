"""Programs written after the mechanism was done: how many of them its first look catches says what it does with others' programs."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import program
from .tiny import HIDDEN, MLP, Attention, Rotary, Tiny, TinyRMSNorm, tiny


class SigmoidGateInFp16(MLP):
    """A gate whose sigmoid is taken in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x.to(torch.float16)).to(x.dtype)
        return super().forward(x * gate)


class QuantisedLinear(nn.Linear):
    """Weights rounded to 16 levels by integers, at each call."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        levels = (self.weight / scale).clamp(-8, 7).to(torch.int32)
        return F.linear(x, levels.to(self.weight.dtype) * scale + 0 * self.weight)


class LowBitMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.up = QuantisedLinear(HIDDEN, 64, bias=False)


class DistanceBias(Attention):
    """A bias of positions, computed in bf16, added to fp32 scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = torch.arange(k.shape[2])
        bias = torch.log1p((steps[:, None] - steps).abs().to(torch.bfloat16)) * 0.3
        scores = (q @ k.transpose(-1, -2)).float() - bias
        return scores.softmax(-1).to(v.dtype) @ v


class NarrowNormModule(TinyRMSNorm):
    """Sums of squares in bf16 through a vector norm."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype) * x / (x.norm(dim=-1, keepdim=True) / HIDDEN**0.5 + 1e-6)


class WideFromTheStart(Tiny):
    """The stream is widened once, between the embedding and the blocks."""

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids).float()


class DoubleAccumulator(MLP):
    """Chunks of the product are added up in fp64."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:2], HIDDEN, dtype=torch.float64)
        for columns in range(0, 64, 16):
            h = F.silu(F.linear(x, self.up.weight[columns : columns + 16]))
            total += F.linear(h, self.down.weight[:, columns : columns + 16])
        return total.to(x.dtype)


class TiedThroughFp16(Tiny):
    """The head multiplies by a copy of the embedding that was fp16 on its way."""

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight.half().float())


class Fp32Head(Tiny):
    def scores(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.head.weight).to(x.dtype)


def straight_through(run) -> None:
    """Weights are rounded in place before each forward, from a hook."""

    def rounded(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            module.up.weight.copy_(module.up.weight.to(torch.bfloat16))

    run.model.layers[0].mlp.register_forward_pre_hook(rounded)


def gradients_through_a_list(run) -> None:
    p = run.model.layers[0].mlp.up.weight
    p.register_hook(lambda g: torch.tensor([[round(v, 3) for v in row] for row in g.tolist()]))


def norm_of_gradients_in_bf16(run) -> None:
    """Clips by a norm that it sums in bf16."""

    def clip(optimizer, args, kwargs) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.bfloat16().square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))

    run.stepper.optimizer.register_step_pre_hook(clip)


def weights_averaged_narrow(run) -> None:
    """After each update the weights become a mean with an earlier copy, taken in bf16."""
    copies: dict[int, Tensor] = {}

    def averaged(optimizer, args, kwargs) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    before = copies.setdefault(id(p), p.detach().clone())
                    p.copy_(torch.lerp(before.bfloat16(), p.bfloat16(), 0.5))

    run.stepper.optimizer.register_step_post_hook(averaged)


class ScaledBackward(torch.autograd.Function):
    """The identity, whose backward scales in fp16."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return (dy.to(torch.float16) * 3).to(dy.dtype) / 3


class WithScaledBackward(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ScaledBackward.apply(x))


class AccumulatesInBf16(torch.autograd.Function):
    """x @ w, whose backward adds the weight's gradient up token by token in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        total = torch.zeros(w.shape, dtype=torch.bfloat16)
        for g, row in zip(dy.flatten(0, 1), x.flatten(0, 1)):
            total += g[:, None] * row
        return dy @ w.to(dy.dtype), total.float()


class WithNarrowAccumulation(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = AccumulatesInBf16.apply(x, self.up.weight)
        return self.down(self.act(h))


class BetweenThreads(MLP):
    """Half of the arithmetic by a worker that computes in fp16."""

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}

        def work() -> None:
            with torch.no_grad():
                kept["gate"] = torch.tanh(x.detach().half()).bfloat16()

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        return super().forward(x) * kept["gate"]


class SiluFromATable(MLP):
    """The activation is read from 64 stored values; how its index is found is left to subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-4, 4, 64), persistent=False)

    def index(self, x: Tensor) -> Tensor:
        return ((x.detach() + 4) * 8).clamp(0, 63).long()

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(self.grid)[self.index(up)].to(up.dtype) + 0 * up)


class SiluFromBuckets(SiluFromATable):
    def index(self, x: Tensor) -> Tensor:
        return torch.bucketize(x.detach().float(), self.grid).clamp(max=63)


class SiluFromTheNearest(SiluFromATable):
    def index(self, x: Tensor) -> Tensor:
        return (x.detach()[..., None] - self.grid).abs().argmin(-1)


class StandardisedByTable(Rotary):
    """Inverse frequencies made anew in fp16 and widened before they are used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = 2 * self.inv_freq.numel()
        exponents = torch.arange(0, size, 2).to(torch.bfloat16) / size
        frequencies = (1.0 / 10000**exponents).float()
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def module_dict_cache() -> Tiny:
    """Keys and values pass through an fp16 tensor that lives for the whole generation."""

    class Kept(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store = torch.zeros(2, *k.shape, dtype=torch.float16)
            store[0], store[1] = k, v
            return super().attend(q, store[0].to(q.dtype), store[1].to(q.dtype))

    from .storage import cached

    return cached(Kept)()


for made in (
    SigmoidGateInFp16, LowBitMLP, DoubleAccumulator, WithScaledBackward, WithNarrowAccumulation, BetweenThreads,
):  # fmt: skip
    program(made.__name__, lambda made=made: tiny(mlp=made))
program("DistanceBias", lambda: tiny(attention=DistanceBias))
program("NarrowNormModule", lambda: tiny(norm1=NarrowNormModule))
program("StandardisedByTable", lambda: tiny(rotary=StandardisedByTable))
for table in (SiluFromATable, SiluFromBuckets, SiluFromTheNearest):
    program(table.__name__, lambda table=table: tiny(mlp=table))
for made in (WideFromTheStart, TiedThroughFp16, Fp32Head):
    program(made.__name__, made)
for change in (straight_through, gradients_through_a_list, norm_of_gradients_in_bf16, weights_averaged_narrow):
    program(change.__name__, tiny, prepare=change)
program("module_dict_cache", module_dict_cache, generate=True)
