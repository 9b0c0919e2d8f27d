"""AdamW for every declared combination of weight, gradient and state dtype, with stochastic rounding; 8-bit AdamW from bitsandbytes.

If all dtypes are fp32, it is torch's fused AdamW; otherwise `MixedAdamW`, since torch's AdamW refuses fp32 gradients of bf16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import TrainSection
from ..dtypes import to_torch
from ..errors import UsageError
from ..precision.precision import Precision

Gradient = Callable[[nn.Parameter], Tensor | None]


def stochastic_round_(target_bf16: Tensor, value_fp32: Tensor, generator: torch.Generator) -> None:
    """Rounds fp32 values to bf16, up or down with probabilities that preserve the mean.

    Adds 16 random bits to the 16 bits that bf16 drops; a carry rounds up. Exact values and infinities do not change.
    """
    noise = torch.randint(0, 1 << 16, value_fp32.shape, dtype=torch.int32, device=value_fp32.device, generator=generator)
    bits = value_fp32.view(torch.int32) + noise
    bits &= -65536
    rounded = bits.view(torch.float32)
    target_bf16.copy_(torch.where(value_fp32.isfinite(), rounded, value_fp32))


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with fp32 arithmetic, whatever dtypes weights, gradients and states have.

    gradient   where a parameter's accumulated gradient is
    state      dtype of the moments
    rounding   nearest or stochastic, into the weight's dtype
    seed       of the rounding noise: a function of seed and step, so that resuming needs no state
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        gradient: Gradient,
        state: str,
        rounding: str,
        seed: int,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._gradient, self._state_dtype, self._stochastic, self._seed = gradient, to_torch(state), rounding == "stochastic", seed
        self._generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        steps = {int(self.state[p]["step"]) for g in self.param_groups for p in g["params"] if self.state[p]}
        self._reseed(max(steps, default=0) + 1)
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._update(parameter, gradient, group)

    def _update(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=self._state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self._state_dtype)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        g_fp32 = gradient.float()
        mean_fp32 = state["exp_avg"].float().lerp_(g_fp32, 1 - beta1)
        square_fp32 = state["exp_avg_sq"].float().mul_(beta2).addcmul_(g_fp32, g_fp32, value=1 - beta2)
        state["exp_avg"].copy_(mean_fp32)
        state["exp_avg_sq"].copy_(square_fp32)
        denominator = (square_fp32 / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        # .float() of an fp32 weight is the weight itself: the update is then in place and there is nothing to store
        weight_fp32 = p.detach().float()
        weight_fp32.mul_(1 - group["lr"] * group["weight_decay"])
        weight_fp32.addcdiv_(mean_fp32, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
        if p.dtype == torch.float32:
            return
        if self._stochastic:
            stochastic_round_(p, weight_fp32, self._generators[p.device])
        else:
            p.copy_(weight_fp32)

    def _reseed(self, step: int) -> None:
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            generator = self._generators.setdefault(device, torch.Generator(device))
            generator.manual_seed(self._seed * 1_000_003 + step)


def build_optimizer(model: nn.Module, train: TrainSection, precision: Precision, gradient: Gradient) -> torch.optim.Optimizer:
    """The optimizer of a run; weight decay on matrices only. Raises UsageError when bitsandbytes is missing."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    betas = (train.beta1, train.beta2)
    if train.optimizer == "adamw8bit":
        try:
            import bitsandbytes
        except ImportError:
            raise UsageError("train.optimizer: adamw8bit needs bitsandbytes", fix="pip install 'isotype[quant]'") from None
        return bitsandbytes.optim.AdamW8bit(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon)
    if precision.trainable == precision.grads == precision.optimizer == "fp32":
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon, fused=True)
    return MixedAdamW(
        groups,
        lr=train.learning_rate,
        betas=betas,
        eps=train.epsilon,
        gradient=gradient,
        state=precision.optimizer,
        rounding=precision.rounding,
        seed=train.seed,
    )
