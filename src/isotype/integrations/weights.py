"""Casts a trainer's weights to the dtypes of a precision, and moves autocast to the inner model.
Both changes can be undone.

`bf16-pure` trains bf16 weights. A trainer sums their gradients in bf16, in `.grad`. With `grads:
fp32`, Isotype instead uses a hook that adds each gradient to an fp32 buffer. Gradient clipping and
Isotype's AdamW (which rounds stochastically) read the gradients from `.grad` or from these buffers.
The trainer gets this AdamW through its attribute `optimizer_cls_and_kwargs`.

accelerate wraps the forward of one object in autocast, and `generate` does not call this wrapper.
The attribute `native_amp` of the trainer's accelerator decides whether accelerate adds the wrapper.
With fp16 the wrapper is kept, because accelerate's gradient scaler reads `native_amp` too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..dtypes import to_torch
from ..errors import UsageError
from ..precision.accumulate import GradientAccumulator
from ..precision.apply import inner_model, is_quantised
from ..precision.precision import Precision
from ..training.optimizer import MixedAdamW
from ..training.step import gradient_norm
from .attachment import MethodWrappers, unwrap_forward, user_override


@dataclass
class CastWeights:
    """Casts weights, and restores them.

    dtypes         each cast parameter and its original dtype
    originals      for each narrowed parameter, by its id: the bits that the rounding lost, or the
                   original tensor, in host memory
    rounded_count  the number of parameters that were rounded without storing their lost bits
    """

    dtypes: list[tuple[nn.Parameter, torch.dtype]] = field(default_factory=list)
    originals: dict[int, RoundingLoss | Tensor] = field(default_factory=dict)
    rounded_count: int = 0

    def cast(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        trained: Collection[str],
        read_only: bool,
        stores_lost_bits: bool,
    ) -> None:
        """Casts trained floating parameters to `trainable` and other floating parameters to `base`.
        Quantised parameters and buffers do not change.

        trained    names of the trained parameters. In a reference model, the parameters with these
                   names are cast to `base` if this changes no value, and to `trainable` otherwise.
                   Both models then compute the same before step 1
        read_only  whether the model is a reference or a teacher
        stores_lost_bits  whether to store the bits that the cast loses
        """
        base = to_torch(precision.unquantised)
        trainable = to_torch(precision.trainable)
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or is_quantised(parameter):
                continue
            if name not in trained or (read_only and _is_exact(parameter, base)):
                dtype = base
            else:
                dtype = trainable
            if parameter.dtype == dtype:
                continue
            self.dtypes.append((parameter, parameter.dtype))
            cast_data = parameter.data.to(dtype)
            if not _is_exact(parameter, dtype):
                if stores_lost_bits:
                    self.originals[id(parameter)] = (
                        RoundingLoss.from_cast(parameter.data, cast_data) or parameter.data.cpu()
                    )
                else:
                    self.rounded_count += 1
            parameter.data = cast_data

    @property
    def stored_bytes(self) -> int:
        return sum(original.nbytes for original in self.originals.values())

    def restore(self) -> list[str]:
        """Restores the dtype of every parameter, and its value if nothing has changed it after the
        cast. Returns a line for each thing that was not restored.
        """
        for parameter, dtype in reversed(self.dtypes):
            original = self.originals.get(id(parameter))
            if isinstance(original, RoundingLoss):
                original = original.restore(parameter.data.cpu())
            elif original is not None and not torch.equal(
                original.to(parameter.dtype), parameter.data.cpu()
            ):
                original = None
            if original is not None:
                parameter.data = original.to(parameter.device)
            else:
                parameter.data = parameter.data.to(dtype)
        message = (
            f"{self.rounded_count} tensors keep the rounding of the precision that was attached"
            " (reversible=False)"
        )
        self.dtypes.clear()
        self.originals.clear()
        return [message] if self.rounded_count else []


@dataclass(frozen=True)
class RoundingLoss:
    """Stores what an fp32 tensor loses when it is rounded to bf16. For each number, this is the
    difference between the bits of the fp32 value and of the bf16 value, from -2^15 to 2^15. This
    information and the bf16 tensor together need as much memory as the fp32 tensor. The bf16 tensor
    and the whole fp32 tensor together would need 1.5 times as much.

    differences  int16[...]: the difference, with 2^15 written as -2^15
    largest_positions  int64[N]: the positions of 2^15 in the flattened tensor
    narrow_sum   the sum of the bf16 tensor's bits, which shows whether the tensor has changed since
    """

    differences: Tensor
    largest_positions: Tensor
    narrow_sum: int

    @classmethod
    def from_cast(cls, wide: Tensor, narrow: Tensor) -> RoundingLoss | None:
        """Computes the bits that a cast from fp32 to bf16 loses. Returns None for other dtypes, and
        if a NaN has different bits in bf16.
        """
        if (
            wide.dtype != torch.float32
            or narrow.dtype != torch.bfloat16
            or not wide.is_contiguous()
        ):
            return None
        difference = _widen_bits(narrow).neg_().add_(wide.view(torch.int32))
        if bool(((difference < -_HALF_STEP) | (difference > _HALF_STEP)).any()):
            return None
        return cls(
            difference.to(torch.int16).cpu(),
            (difference.view(-1) == _HALF_STEP).nonzero().view(-1).cpu(),
            _sum_bits(narrow),
        )

    @property
    def nbytes(self) -> int:
        return self.differences.nbytes + self.largest_positions.nbytes

    def restore(self, narrow: Tensor) -> Tensor | None:
        """Returns the fp32 tensor, on the CPU; None if the bf16 tensor has changed."""
        if narrow.dtype != torch.bfloat16 or _sum_bits(narrow) != self.narrow_sum:
            return None
        bits = _widen_bits(narrow).add_(self.differences)
        bits.view(-1)[self.largest_positions] += 2 * _HALF_STEP
        return bits.view(torch.float32)


_HALF_STEP = 1 << 15  # half the distance of two bf16 numbers, in units of the last fp32 bit
_SUM_CHUNK = 1 << 22  # number of elements per chunk; a sum in another dtype copies its operand


def _widen_bits(narrow: Tensor) -> Tensor:
    """Returns the bits that each number has in fp32, as int32[...]."""
    return narrow.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


def _sum_bits(narrow: Tensor) -> int:
    return sum(
        int(part.sum(dtype=torch.int64))
        for part in narrow.view(-1).view(torch.int16).split(_SUM_CHUNK)
    )


def _is_exact(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Returns True if a cast to `dtype` keeps every value."""
    return torch.equal(parameter.data.to(dtype).to(parameter.dtype), parameter.data)


class ResumableAdamW(MixedAdamW):
    """A `MixedAdamW` that keeps the dtype of its moments when a checkpoint is loaded. torch's
    optimizers would cast the moments to the dtype of the weights.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters):
            saved = state_dict["state"].get(number, {})
            self.state[p].update(
                {
                    k: v.to(p.device, self.state_dtype)
                    for k, v in saved.items()
                    if isinstance(v, Tensor) and v.dim()
                }
            )
            if "step" in saved:
                self.state[p]["step"] = int(saved["step"])


def check_low_precision_training(trainer: Any, precision: Precision, preset: str) -> None:
    """Raises UsageError if a trainer cannot train low-precision weights."""
    args = trainer.args
    optim = getattr(args.optim, "value", args.optim)
    reason = ""
    fix = "precision='bf16-mixed' (fp32 weights), or isotype train with bf16-pure"
    if precision.rounding != "stochastic":
        reason = (
            f": trainable {precision.trainable}, rounding {precision.rounding}: in a trainer,"
            " low-precision weights are trained with stochastic rounding"
        )
    elif args.world_size > 1:
        reason = f" on {args.world_size} processes: DDP sums gradients in the weights' own dtype"
    elif trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        reason = " brings an optimizer of its own, and this trainer was given one"
        fix = "leave out optimizers=(...)"
    elif optim not in ("adamw_torch", "adamw_torch_fused"):
        reason = f" trains with AdamW, and the arguments ask for optim={optim}"
        fix = "optim='adamw_torch'"
    if reason:
        raise UsageError(f"precision {preset}{reason}", fix=fix)


class LowPrecisionWeights(TrainerCallback):
    """Adds gradient buffers and Isotype's optimizer to a trainer whose trained weights have a dtype
    below fp32.
    """

    def __init__(self, trainer: Any, precision: Precision) -> None:
        self.trainer = trainer
        self.precision = precision
        self.methods = MethodWrappers(trainer)
        self.accumulator = GradientAccumulator(trainer.model.parameters(), dtype=precision.grads)

    def install(self) -> None:
        self.methods.wrap("create_optimizer", self._create_optimizer)
        self.methods.wrap("_clip_grad_norm", self._clip_grad_norm)
        self.methods.wrap("_get_grad_norm", self._get_grad_norm)
        self.trainer.add_callback(self)

    def _create_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes the trainer build Isotype's AdamW with the settings of the trainer's arguments. The
        trainer calls this method when a training begins.
        """
        trainer = self.trainer
        _, settings = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        trainer.optimizer_cls_and_kwargs = (
            ResumableAdamW,
            {
                "lr": settings["lr"],
                "betas": settings["betas"],
                "eps": settings["eps"],
                "gradient": self.accumulator.gradient,
                "state": self.precision.optimizer,
                "rounding": self.precision.rounding,
                "seed": trainer.args.seed,
            },
        )
        return original(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raises UsageError if the trainer does not use Isotype's optimizer. Another optimizer
        would not find the gradients, which are in separate fp32 buffers, and would not round its
        updates stochastically.
        """
        # accelerate wraps the optimizer
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        if not isinstance(optimizer, ResumableAdamW):
            creator = user_override(self.trainer, "create_optimizer") or type(self.trainer).__name__
            raise UsageError(
                f"bf16-pure trains with Isotype's AdamW, and {creator} makes {type(optimizer).__name__}:"
                " it would round most updates away",
                fix="leave out create_optimizer, or precision='bf16-mixed' (fp32 weights)",
            )

    def remove(self) -> None:
        self.trainer.remove_callback(self)
        self.methods.restore()
        self.trainer.optimizer_cls_and_kwargs = None
        self.accumulator.close()

    def _clip_grad_norm(self, original: Callable[..., Any], model: nn.Module) -> Tensor:
        """Clips the gradients by torch's formula. Their norm is computed in fp32."""
        gradients = self.accumulator.gradients()
        norm = gradient_norm(gradients)
        if bool(norm.isfinite()):  # otherwise `Guards` stops the run and names the parameter
            torch._foreach_mul_(
                gradients, (self.trainer.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            )
        return norm

    def _get_grad_norm(
        self, original: Callable[..., Any], model: nn.Module, grad_norm: Any = None
    ) -> Any:
        if grad_norm is not None:
            return grad_norm
        return gradient_norm(self.accumulator.gradients())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.accumulator.zero()


def widen_logits(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of the inner model. It returns logits in fp32, as accelerate's wrapper does.
    If the logits are deferred (not computed yet), it only stores that they must be fp32 when they
    are computed.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.dtype in (torch.bfloat16, torch.float16):
        output.logits = logits.float()
    return output


def disable_accelerate_autocast(
    accelerator: Any, models: list[nn.Module], precision: Precision, undo: list[Any]
) -> None:
    """Switches accelerate's autocast off, and appends to `undo` the functions that restore it.

    The trainer already wrapped the forward of its reference models when the trainer was created.
    This function removes these wrappers.
    """
    undo.append(partial(setattr, accelerator, "native_amp", accelerator.native_amp))
    if precision.loss_scaling == "none":
        accelerator.native_amp = False
    for model in models:
        undo.append(partial(model.__dict__.update, unwrap_forward(model)))
        if precision.compute != "fp32":
            undo.append(inner_model(model).register_forward_hook(widen_logits).remove)
