"""Programs that break the declaration in backward and in the update: custom functions, hooks, optimizers."""

from __future__ import annotations

import torch
from torch import Tensor

from .program import program
from .tiny import MLP, tiny


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


class SignOfTheGradient(torch.autograd.Function):
    """Hands on a gradient of two values."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x @ w.to(x.dtype).t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return (dy.sign() * dy.abs().mean()) @ w.to(dy.dtype), None


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


def hooked(rounding):
    def prepare(run) -> None:
        for p in run.model.layers[1].mlp.parameters():
            p.register_hook(rounding)

    return prepare


def through_numpy(g: Tensor) -> Tensor:
    import numpy as np

    return torch.from_numpy(g.numpy().astype(np.float16).astype(np.float32))


def after_accumulation(run) -> None:
    def rounded(p: Tensor) -> None:
        p.grad = p.grad.bfloat16().float()

    for p in run.model.layers[1].mlp.parameters():
        p.register_post_accumulate_grad_hook(rounded)


def accumulated_in_bf16(run) -> None:
    """Gradients are added up in a tensor of bf16, which no cast shows, and come back."""
    sums: dict[Tensor, Tensor] = {}

    def added(p: Tensor) -> None:
        total = sums.setdefault(p, torch.zeros_like(p, dtype=torch.bfloat16)).add_(p.grad)
        p.grad.copy_(total)

    for p in run.model.layers[1].mlp.parameters():
        p.register_post_accumulate_grad_hook(added)


def module_backward_hook(run) -> None:
    """Gradients of activations in fp16."""
    run.model.layers[1].mlp.register_full_backward_hook(lambda m, gi, go: tuple(g.half().to(g.dtype) for g in gi))


def before_the_update(run) -> None:
    def rounded(optimizer, args, kwargs) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(p.grad.bfloat16())

    run.stepper.optimizer.register_step_pre_hook(rounded)


def states_rounded(run) -> None:
    def rounded(optimizer, args, kwargs) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())

    run.stepper.optimizer.register_step_post_hook(rounded)


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


class HiddenState(torch.optim.SGD):
    """Keeps a second copy of the weights in bf16 where nobody looks, and writes it back."""

    def step(self, closure=None):
        super().step(closure)
        self.copies = [p.detach().bfloat16() for g in self.param_groups for p in g["params"]]
        with torch.no_grad():
            for p, copy in zip((p for g in self.param_groups for p in g["params"]), self.copies):
                p.copy_(copy)


def hidden_state(run) -> None:
    run.stepper.optimizer = HiddenState(run.model.parameters(), lr=1e-3)


program("custom_backward_sums_in_bf16", lambda: tiny(mlp=with_function(NarrowSum)))
program("custom_backward_multiplies_in_fp32", lambda: tiny(mlp=with_function(WideProduct)))
program("custom_backward_multiplies_in_fp16", lambda: tiny(mlp=with_function(Fp16Backward)))
program("custom_backward_of_two_values", lambda: tiny(mlp=with_function(SignOfTheGradient)), preset="fp32")
program("hook_rounds_a_gradient", tiny, prepare=hooked(lambda g: g.bfloat16().float()))
program("hook_cuts_bits", tiny, prepare=hooked(lambda g: (g.view(torch.int32) & -65536).view(torch.float32)))
program("hook_puts_a_gradient_on_a_grid", tiny, prepare=hooked(lambda g: (g * 1024).round() / 1024))
program("hook_through_numpy", tiny, prepare=hooked(through_numpy))
program("hook_multiplies_in_bf16", tiny, prepare=hooked(lambda g: (g.bfloat16() * 0.5).float()))
program("hook_after_accumulation", tiny, prepare=after_accumulation)
program("accumulated_in_bf16", tiny, prepare=accumulated_in_bf16)
program("module_backward_hook", tiny, prepare=module_backward_hook)
program("gradients_rounded_before_the_update", tiny, prepare=before_the_update)
program("states_rounded", tiny, prepare=states_rounded)
program("states_kept_narrow", tiny, prepare=states_kept_narrow)
program("optimizer_sums_in_bf16", tiny, prepare=with_optimizer(torch.bfloat16, torch.float32))
program("optimizer_keeps_bf16", tiny, prepare=with_optimizer(torch.float32, torch.bfloat16))
program("optimizer_in_fp64", tiny, prepare=with_optimizer(torch.float64, torch.float32))
program("weights_rounded_after_the_update", tiny, prepare=hidden_state)
