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
from ..ops.adamw import AdamwNumbers, adamw_
from ..precision.parts import first_element, local_part
from ..precision.precision import Precision

Gradient = Callable[[nn.Parameter], Tensor | None]


class MixedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with fp32 arithmetic, for weights, gradients and states of any dtype.

    gradient   where a parameter's accumulated gradient is
    state      dtype of the moments
    rounding   nearest or stochastic, into the weight's dtype
    seed       of the rounding noise: a function of seed, step and element, so that resuming needs no state and processes that share a
               weight round it as one would
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
        self._gradient, self.state_dtype, self._stochastic, self._seed = gradient, to_torch(state), rounding == "stochastic", seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure would compute the loss again, which this loop does not
        every = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        for index, (parameter, group) in enumerate(every):
            gradient = self._gradient(parameter)
            if gradient is not None:
                self._update(parameter, gradient, group, index)

    def _update(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], index: int) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
        state["step"] += 1
        numbers = AdamwNumbers(
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"],
            step=state["step"],
        )  # fmt: skip
        adamw_(
            local_part(p.detach()), gradient, local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]), numbers,
            # another number for each parameter and step; both stay within 63 bits
            seed=(self._seed * 1_000_003 + state["step"]) % 2**40 * 2**20 + index % 2**20 if self._stochastic else None,
            first=first_element(p),
        )  # fmt: skip


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
    # torch's fused AdamW refuses meta tensors, with which a memory plan runs; MixedAdamW's kernel has its operands and results
    if precision.trainable == precision.grads == precision.optimizer == "fp32" and not any(p.is_meta for p in trainable):
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


def adopt_states(optimizer: torch.optim.Optimizer) -> bool:
    """Makes restored states those that this optimizer keeps: its dtype of the moments, its kind of step count.

    A resume may change both with consent. States of 8 bits and the others are not each other's: then all are forgotten, and it is False.
    """
    eight_bit = not isinstance(optimizer, (MixedAdamW, torch.optim.AdamW))
    states = [(parameter, state) for parameter, state in optimizer.state.items() if state]
    if any(eight_bit == ("exp_avg" in state) for _, state in states):
        optimizer.state.clear()
        return False
    if eight_bit:
        return True
    dtype = optimizer.state_dtype if isinstance(optimizer, MixedAdamW) else torch.float32
    for parameter, state in states:
        state |= {key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}
        if isinstance(optimizer, MixedAdamW):
            state["step"] = int(state["step"])
        elif not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]), device=parameter.device)
    return True
