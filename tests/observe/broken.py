"""Programs that break the declaration: by products, the loss, sums, fp64, numbers and tables made
narrow, or by what they store.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .run import program
from .tiny import HIDDEN, MLP, Attention, Rotary, Tiny, tiny


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
            return F.linear(F.silu(F.linear(x.float(), self.up.weight)), self.down.weight).to(
                x.dtype
            )


class Fp32Attention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), is_causal=True
            ).to(q.dtype)


class NarrowTable(Rotary):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(x.shape[1]).to(torch.bfloat16), self.inv_freq.bfloat16())
        angles = torch.cat([angles, angles], -1)
        return angles.cos().float().to(x.dtype), angles.sin().float().to(x.dtype)


def narrow_loss(run) -> None:
    """The loss in bf16, widened at the end."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        logp = logits.bfloat16().log_softmax(-1)
        picked = logp.flatten(0, 1).gather(1, labels.clamp(min=0).flatten()[:, None]).squeeze(1)
        return -(picked * (labels.flatten() >= 0)).sum().float()

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
        return (dy.float() @ w.float()).to(x.dtype), dy.flatten(0, 1).float().t() @ x.flatten(
            0, 1
        ).float()


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


def norm_of_gradients_in_bf16(run) -> None:
    """Clips by a norm that it sums in bf16."""

    def clip(optimizer, args, kwargs) -> None:
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.stack([g.bfloat16().square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))

    run.stepper.optimizer.register_step_pre_hook(clip)


def at_step(number: int, change):
    return lambda run, step: change(run) if step == number else None


def swap_buffer(run) -> None:
    run.model.rotary.inv_freq = run.model.rotary.inv_freq.bfloat16()


def swap_module(run) -> None:
    new = Fp16MLP()
    new.load_state_dict(run.model.layers[0].mlp.state_dict())
    run.model.layers[0].mlp = new


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


# numbers that are rounded when they are made: a dropout's scale in a narrow dtype, which arithmetic
# widens without a cast
DROPPED = 0.1
MAKERS: dict[str, Callable[[Tensor, float, torch.dtype], Tensor]] = {
    "full": lambda y, number, dtype: torch.full(y.shape, number, dtype=dtype),
    "tensor": lambda y, number, dtype: torch.tensor(number, dtype=dtype),
    "fill": lambda y, number, dtype: torch.empty(y.shape, dtype=dtype).fill_(number),
    "assigned": lambda y, number, dtype: _assigned(torch.zeros(y.shape, dtype=dtype), number),
    "masked_fill": lambda y, number, dtype: torch.zeros(y.shape, dtype=dtype).masked_fill(
        torch.rand(y.shape) > DROPPED, number
    ),
    "where": lambda y, number, dtype: torch.where(
        torch.rand(y.shape) > DROPPED, torch.ones(y.shape, dtype=dtype), number
    ),
    "linspace": lambda y, number, dtype: torch.linspace(
        0, number * y.shape[-1], y.shape[-1] + 1, dtype=dtype
    )[1:],
    "arange": lambda y, number, dtype: torch.arange(
        number, number * (y.shape[-1] + 0.5), number, dtype=dtype
    ),
}


def _assigned(tensor: Tensor, number: float) -> Tensor:
    tensor[..., 1:] = number
    return tensor


def dropout(
    make: Callable[[Tensor, float, torch.dtype], Tensor],
    dtype: torch.dtype,
    number: float = 1 / (1 - DROPPED),
) -> type[MLP]:
    """Scales what it keeps by a number that is made in `dtype`."""

    class Dropout(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return (y * make(y, number, dtype) * (torch.rand(y.shape) > DROPPED)).to(y.dtype)

    return Dropout


for made in (Fp16MLP, Fp32MLP, RunningMean, DoubleAccumulator, CompiledMLP, CustomOp):
    program(made.__name__, lambda made=made: tiny(mlp=made))
for made in (Fp32Attention, DistanceBias):
    program(made.__name__, lambda made=made: tiny(attention=made))
program("NarrowTable", lambda: tiny(rotary=NarrowTable))
for change in (narrow_loss, accumulated_in_bf16, norm_of_gradients_in_bf16, recast):
    program(change.__name__, tiny, prepare=change)
program("custom_backward_sums_in_bf16", lambda: tiny(mlp=with_function(NarrowSum)))
program("custom_backward_multiplies_in_fp32", lambda: tiny(mlp=with_function(WideProduct)))
program("optimizer_sums_in_bf16", tiny, prepare=with_optimizer(torch.bfloat16, torch.float32))
program("optimizer_keeps_bf16", tiny, prepare=with_optimizer(torch.float32, torch.bfloat16))
program("optimizer_in_fp64", tiny, prepare=with_optimizer(torch.float64, torch.float32))
program("bf16_table_buffer", with_buffer_in(torch.bfloat16))
program("buffer_swapped_later", tiny, steps=4, before_step=at_step(3, swap_buffer))
program("module_swapped_later", tiny, steps=4, before_step=at_step(3, swap_module))
for name, make in MAKERS.items():
    program(
        f"{name}_in_fp32", lambda make=make: tiny(mlp=dropout(make, torch.bfloat16)), preset="fp32"
    )
