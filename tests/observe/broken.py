"""Programs that break the declaration: by products, the loss, sums, fp64, numbers and tables made narrow, or by what they store."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import program
from .tiny import HIDDEN, MLP, Attention, Rotary, Tiny, tiny


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


class Fp32Attention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)


class NarrowScale(Attention):
    """The scale of the scores from a sum of squares in bf16, widened afterwards."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.full((q.shape[-1],), 1.1, dtype=torch.bfloat16).pow(2).sum().rsqrt().float()
        return F.scaled_dot_product_attention((q.float() * scale).to(q.dtype), k, v, is_causal=True)


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


class ScaledEmbedding(Tiny):
    """The embedding is scaled in fp64."""

    def embedded(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return (x.double() * HIDDEN**0.5).to(x.dtype)


class NarrowAuxiliaryLoss(Tiny):
    """Log-probabilities inside the model, in bf16, whose mean is added to the logits."""

    def scores(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return y + 1e-3 * y.log_softmax(-1).mean(-1, keepdim=True)


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


class NarrowSum(torch.autograd.Function):
    """y = x + b, whose backward sums the bias's gradient in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, b: Tensor) -> Tensor:
        return x + b.to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy.bfloat16().sum((0, 1)).float()


class WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (dy.float() @ w.float()).to(x.dtype), dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float()


class Fp16Backward(WideProduct):
    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (dy.half() @ w.half()).to(x.dtype), (dy.flatten(0, 1).t() @ x.flatten(0, 1)).float()


def with_function(function: type[torch.autograd.Function]) -> type[MLP]:
    class Made(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(32))

        def forward(self, x: Tensor) -> Tensor:
            if function is NarrowSum:
                return super().forward(function.apply(x, self.bias))
            with torch.autocast("cpu", enabled=False):
                h = function.apply(x, self.up.weight)
            return self.down(self.act(h))

    return Made


def accumulated_in_bf16(run) -> None:
    """Gradients are added up in a tensor of bf16, which no cast shows, and come back."""
    sums: dict[Tensor, Tensor] = {}

    def added(p: Tensor) -> None:
        total = sums.setdefault(p, torch.zeros_like(p, dtype=torch.bfloat16)).add_(p.grad)
        p.grad.copy_(total)

    for p in run.model.layers[1].mlp.parameters():
        p.register_post_accumulate_grad_hook(added)


def states_kept_narrow(run) -> None:
    def rounded(optimizer, args, kwargs) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()

    run.stepper.optimizer.register_step_post_hook(rounded)


class SignMomentum(torch.optim.Optimizer):
    """Keeps its momentum, and does its sums, in the dtype it is given."""

    def __init__(self, parameters, dtype: torch.dtype, kept: torch.dtype) -> None:
        super().__init__(list(parameters), {"lr": 1e-3})
        self.dtype, self.kept = dtype, kept

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p, dtype=self.kept))
                moved = mean.to(self.dtype).mul_(0.9).add_(p.grad.to(self.dtype), alpha=0.1)
                mean.copy_(moved)
                p.add_(moved.sign().to(p.dtype), alpha=-group["lr"])


def with_optimizer(dtype: torch.dtype, kept: torch.dtype):
    def prepare(run) -> None:
        run.stepper.optimizer = SignMomentum(run.model.parameters(), dtype, kept)

    return prepare


def with_buffer_in(dtype: torch.dtype):
    def build() -> Tiny:
        model = tiny()
        model.rotary.inv_freq = model.rotary.inv_freq.to(dtype)
        return model

    return build


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


def recast(run) -> None:
    weight = run.model.layers[0].mlp.up.weight
    weight.data = weight.data.bfloat16()


class DistanceBias(Attention):
    """A bias of positions, computed in bf16, added to fp32 scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = torch.arange(k.shape[2])
        bias = torch.log1p((steps[:, None] - steps).abs().to(torch.bfloat16)) * 0.3
        scores = (q @ k.transpose(-1, -2)).float() - bias
        return scores.softmax(-1).to(v.dtype) @ v


class DoubleAccumulator(MLP):
    """Chunks of the product are added up in fp64."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:2], HIDDEN, dtype=torch.float64)
        for columns in range(0, 64, 16):
            h = F.silu(F.linear(x, self.up.weight[columns : columns + 16]))
            total += F.linear(h, self.down.weight[:, columns : columns + 16])
        return total.to(x.dtype)


class Fp32Head(Tiny):
    def scores(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.head.weight).to(x.dtype)


def norm_of_gradients_in_bf16(run) -> None:
    """Clips by a norm that it sums in bf16."""

    def clip(optimizer, args, kwargs) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.bfloat16().square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))

    run.stepper.optimizer.register_step_pre_hook(clip)


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


class StandardisedByTable(Rotary):
    """Inverse frequencies made anew in fp16 and widened before they are used."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = 2 * self.inv_freq.numel()
        exponents = torch.arange(0, size, 2).to(torch.bfloat16) / size
        frequencies = (1.0 / 10000**exponents).float()
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LaterInFp16(MLP):
    """Right in its first call, in fp16 from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls == 1 else in_fp16(self, x)


def at_step(number: int, change):
    return lambda run, step: change(run) if step == number else None


def swap_buffer(run) -> None:
    run.model.rotary.inv_freq = run.model.rotary.inv_freq.bfloat16()


def swap_forward(run) -> None:
    mlp = run.model.layers[0].mlp
    mlp.forward = lambda x: in_fp16(mlp, x)


def swap_module(run) -> None:
    new = Fp16MLP()
    new.load_state_dict(run.model.layers[0].mlp.state_dict())
    run.model.layers[0].mlp = new


def swap_parameter(run) -> None:
    mlp = run.model.layers[0].mlp
    mlp.up.weight = nn.Parameter(mlp.up.weight.detach().bfloat16())


class CompiledMLP(MLP):
    """In fp16, within a compiled region."""

    def __init__(self) -> None:
        super().__init__()
        self.run = torch.compile(self.inner, backend="eager")

    def inner(self, x: Tensor) -> Tensor:
        return MLP.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


@torch.library.custom_op("programs::narrow_mean", mutates_args=())
def narrow_mean(x: Tensor) -> Tensor:
    return x.half().mean(-1, keepdim=True).to(x.dtype)


@narrow_mean.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1))


class CustomOp(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - narrow_mean(x.detach()))


for made in (
    Fp64ThenFp16MLP, Fp16MLP, Fp32MLP, EinsumMLP, Fp32Convolution, RunningMean, DoubleAccumulator, WithNarrowAccumulation, CompiledMLP,
    CustomOp,
):  # fmt: skip
    program(made.__name__, lambda made=made: tiny(mlp=made))
for made in (Fp16Scores, Fp32Attention, NarrowScale, Fp64Bias, DistanceBias):
    program(made.__name__, lambda made=made: tiny(attention=made))
for made in (NarrowTable, Fp16Table, StandardisedByTable):
    program(made.__name__, lambda made=made: tiny(rotary=made))
for made in (ScaledEmbedding, NarrowAuxiliaryLoss, Fp32Head):
    program(made.__name__, made)
for change in (narrow_loss, narrow_written_out_loss, accumulated_in_bf16, states_kept_narrow, norm_of_gradients_in_bf16, recast):
    program(change.__name__, tiny, prepare=change)
program("custom_backward_sums_in_bf16", lambda: tiny(mlp=with_function(NarrowSum)))
program("custom_backward_multiplies_in_fp32", lambda: tiny(mlp=with_function(WideProduct)))
program("custom_backward_multiplies_in_fp16", lambda: tiny(mlp=with_function(Fp16Backward)))
program("optimizer_sums_in_bf16", tiny, prepare=with_optimizer(torch.bfloat16, torch.float32))
program("optimizer_keeps_bf16", tiny, prepare=with_optimizer(torch.float32, torch.bfloat16))
program("optimizer_in_fp64", tiny, prepare=with_optimizer(torch.float64, torch.float32))
program("bf16_table_buffer", with_buffer_in(torch.bfloat16))
program("later_in_fp16", lambda: tiny(mlp=LaterInFp16), steps=8)
program("buffer_swapped_later", tiny, steps=4, before_step=at_step(3, swap_buffer))
program("forward_swapped_later", tiny, steps=4, before_step=at_step(3, swap_forward))
program("module_swapped_later", tiny, steps=4, before_step=at_step(3, swap_module))
program("parameter_swapped_later", tiny, steps=4, before_step=at_step(3, swap_parameter))
