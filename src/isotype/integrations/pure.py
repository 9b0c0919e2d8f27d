"""`bf16-pure` in a trainer: bf16 weights, gradients summed in fp32 buffers, and an AdamW that rounds stochastically.

The trainer gets the optimizer through its own `optimizer_cls_and_kwargs`. A trainer sums gradients in `.grad`, in the weights' dtype. Here
a hook adds each gradient to its buffer; clipping and the optimizer use the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from transformers import TrainerCallback

from ..errors import UsageError
from ..precision.accumulate import GradientAccumulator
from ..precision.precision import Precision
from ..training.optimizer import MixedAdamW
from .methods import Methods

ADAMW = ("adamw_torch", "adamw_torch_fused")


class ResumableAdamW(MixedAdamW):
    """Keeps the moments' dtype when a checkpoint is loaded; torch would cast them to the weights' dtype."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters):
            saved = state_dict["state"].get(number, {})
            self.state[p].update({k: v.to(p.device, self.state_dtype) for k, v in saved.items() if isinstance(v, Tensor) and v.dim()})
            if "step" in saved:
                self.state[p]["step"] = int(saved["step"])


def check_pure(trainer: Any, precision: Precision, preset: str) -> None:
    """Raises  UsageError where a trainer cannot train such weights"""
    args = trainer.args
    if precision.grads != "fp32" or precision.rounding != "stochastic":
        raise UsageError(
            f"precision {preset}: trainable {precision.trainable}, grads {precision.grads}, rounding {precision.rounding}: "
            "in a trainer, low-precision weights are trained with fp32 gradients and stochastic rounding",
            fix="precision='bf16-pure', or 'bf16-mixed' (fp32 weights)",
        )
    if args.world_size > 1:
        raise UsageError(
            f"precision {preset} on {args.world_size} processes: DDP sums gradients in the weights' own dtype",
            fix="precision='bf16-mixed' (fp32 weights), one process, or isotype train with bf16-pure",
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UsageError(
            f"precision {preset} brings an optimizer of its own, and this trainer was given one", fix="leave out optimizers=(...)"
        )
    if str(getattr(args.optim, "value", args.optim)) not in ADAMW:
        raise UsageError(f"precision {preset} trains with AdamW, and the arguments ask for optim={args.optim!s}", fix="optim='adamw_torch'")


class PureWeights(TrainerCallback):
    """One trainer's buffers and optimizer."""

    def __init__(self, trainer: Any, precision: Precision) -> None:
        self.trainer, self.precision, self.methods = trainer, precision, Methods(trainer)
        self.accumulator = GradientAccumulator(trainer.model.parameters(), dtype=precision.grads)

    def install(self) -> None:
        trainer = self.trainer
        _, given = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        trainer.optimizer_cls_and_kwargs = ResumableAdamW, {
            "lr": given["lr"], "betas": given["betas"], "eps": given["eps"], "gradient": self.accumulator.gradient,
            "state": self.precision.optimizer, "rounding": self.precision.rounding, "seed": trainer.args.seed,
        }  # fmt: skip
        self.methods.wrap("_clip_grad_norm", self._clip_grad_norm)
        self.methods.wrap("_get_grad_norm", self._get_grad_norm)
        trainer.add_callback(self)

    def remove(self) -> None:
        self.trainer.remove_callback(self)
        self.methods.restore()
        self.trainer.optimizer_cls_and_kwargs = None
        self.accumulator.close()

    def _clip_grad_norm(self, original: Callable[..., Any], model: nn.Module) -> Tensor:
        """The same as torch's clipping, on the buffers."""
        gradients = self.accumulator.gradients()
        norm = get_total_norm(gradients)
        if bool(norm.isfinite()):  # the guards stop the run otherwise, and name what was not finite
            torch._foreach_mul_(gradients, (self.trainer.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _get_grad_norm(self, original: Callable[..., Any], model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm if grad_norm is not None else get_total_norm(self.accumulator.gradients())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.accumulator.zero()
