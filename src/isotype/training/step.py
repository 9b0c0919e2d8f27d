"""Runs one optimizer step. A step accumulates the gradients of the micro-batches and divides them
by the weight of these batches. Then it checks and clips the gradients, updates the weights, and
measures the share of weights that changed.
"""

from __future__ import annotations

import math
import random
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..config.schema import AdapterSection, TrainSection
from ..distributed.shard import Sharding
from ..distributed.world import ALONE, World
from ..environment.memory_limits import status_bytes
from ..errors import RunError
from ..observe.continuity import Continuity
from ..optimize import check_placed
from ..precision.accumulate import GradientAccumulator
from ..precision.parts import local_part
from ..precision.precision import Precision
from .finite import non_finite_error, non_finite_parameters
from .optimizer import MixedAdamW, build_optimizer
from .task import Batch, IdleBatch, LossSum

# the size of the sample for `share_changed`, which gives the share to within 1% and needs a few
# kilobytes
SAMPLED_PARAMETERS = 32
SAMPLED_ELEMENTS = 256
# dynamic loss scaling
INITIAL_SCALE = 2.0**16
# steps without overflow before the scale doubles; torch.amp.GradScaler's default
GROWTH_INTERVAL = 2000
_NORM_CHUNK = 1 << 20  # number of elements of a gradient whose norm is computed at a time
SMALLEST_SCALE = 1.0  # if gradients overflow at this scale, they do not fit fp16 themselves
T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    loss           the sum of the losses, divided by `weight`
    gradient_norm  the norm of all gradients before they are clipped
    units          number of tokens or pictures of the step
    weight         the number by which the sum of the losses was divided
    share_changed  the share of weights that the previous update changed; None if not measured
    has_overflow   whether the update was skipped because an fp16 gradient overflowed
    loss_scale     the factor by which this step's loss is multiplied; None without loss scaling
    measures       the means of the task's other measures, in the task's order
    """

    loss: float
    gradient_norm: float
    units: int
    weight: int
    share_changed: float | None
    has_overflow: bool = False
    loss_scale: float | None = None
    measures: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class ReducedStep:
    """The numbers of a step, summed over the processes that share the step.

    local_loss     the loss of the micro-batches of this process
    loss           the loss of the micro-batches of all processes
    gradient_norm  the norm of the whole gradient, which is still multiplied by the loss scale
    share_changed  the share of weights that the last measured update changed; None if not measured
    measures       the means of the task's other measures
    """

    local_loss: float
    loss: float
    gradient_norm: float
    share_changed: float | None
    measures: Sequence[float]


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16. The loss is multiplied by `scale`. If a gradient overflows,
    the scale is halved. After GROWTH_INTERVAL steps without overflow, it is doubled. `quiet` counts
    these steps.
    """

    scale: float = INITIAL_SCALE
    quiet: int = 0

    def update(self, *, has_overflow: bool, step: int) -> None:
        """Adapts the loss scale after a step. Raises RunError FP001 if the scale has fallen below
        1, because halving it again would not help.
        """
        if has_overflow:
            self.scale = self.scale / 2
            self.quiet = 0
            if self.scale < SMALLEST_SCALE:
                raise RunError(
                    f"step {step}: the loss scale collapsed to {self.scale:g}: gradients overflow"
                    " fp16 at any scale",
                    code="FP001",
                    fix="precision.preset: bf16-mixed or bf16-lora where bf16 is native, else fp32",
                )
        else:
            self.quiet += 1
            if self.quiet >= GROWTH_INTERVAL:
                self.scale = self.scale * 2
                self.quiet = 0


class Stepper:
    """Runs optimizer steps. No other class changes the trainable weights, the optimizer, the
    gradients or the loss scale.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accumulator: GradientAccumulator,
        precision: Precision,
        train: TrainSection,
        loss_sum: LossSum,
        world: World = ALONE,
        sharding: Sharding | None = None,
    ) -> None:
        """
        loss_sum  the task's loss function, which computes in the dtype of `precision.loss`
        world     the processes that share a step; each process computes its own micro-batches, and
                  all make the same update
        sharding  how the model is distributed over the processes; None if each has the whole model
        """
        self.model = model
        self.optimizer = optimizer
        self.accumulator = accumulator
        self.precision = precision
        self.train = train
        self.loss_sum = loss_sum
        self.world = world
        self.sharding = sharding
        self.loss_scale = LossScale() if precision.loss_scaling == "dynamic" else None
        self.loss_dtype: torch.dtype | None = None  # of the last forward, for the observer
        self.measure_sums: Tensor | None = None
        # compares sampled values with those that the last update left. If other code has changed
        # them, `report_outside_change` is called with the step's number before the step's update
        self.continuity: Continuity | None = None
        self.report_outside_change: Callable[[int], None] = lambda step: None
        self._is_changed_outside = False
        self._sampled_elements = choose_sampled_elements(accumulator.parameters)
        # the share of weights that the last measured update changed; the next step reads it from
        # the device together with its loss
        self.share_changed: Tensor | None = None

    def accumulate(
        self, batches: Sequence[Batch], weight: int | None = None, *, sends_gradients: bool = False
    ) -> Tensor:
        """Runs forward and backward for every micro-batch. Returns the sum of the losses of all
        micro-batches, divided by `weight`. By default, `weight` is the sum of the weights of the
        micro-batches. The task's other measures are summed and divided in the same way, and stored
        in `measure_sums`.

        sends_gradients  whether to send gradients to the other processes during the last backward;
                         all processes then call this method together
        """
        weight = max(1, sum(batch.weight for batch in batches) if weight is None else weight)
        loss_total: Tensor | None = None
        self.measure_sums = None
        for number, batch in enumerate(batches, 1):
            loss = self._loss_sum(batch, weight)
            if loss.dim():
                measures = loss[1:].detach().float()
                if self.measure_sums is None:
                    self.measure_sums = measures
                else:
                    self.measure_sums = self.measure_sums + measures
                loss = loss[0]
            self.loss_dtype = loss.dtype
            loss = loss.float()
            if sends_gradients and number == len(batches):
                self.accumulator.begin_sums()
            scaled_loss = loss * self.loss_scale.scale if self.loss_scale else loss
            scaled_loss.backward()
            loss_total = loss.detach() if loss_total is None else loss_total + loss.detach()
        assert loss_total is not None, "a step has at least one micro-batch"
        return loss_total

    def _loss_sum(self, batch: Batch, divisor: int) -> Tensor:
        inner_batch = batch.batch if isinstance(batch, IdleBatch) else batch
        loss = self.loss_sum(self.model, inner_batch, divisor)
        return loss * 0.0 if isinstance(batch, IdleBatch) else loss

    def __call__(
        self, batches: Sequence[Batch], *, step: int, learning_rate: float, watch_changes: bool
    ) -> StepResult:
        """Runs one step.

        Raises, before any weight changes: RunError NF001 if the loss is not finite, or if a
        gradient is not finite and there is no loss scaling; DtypeError DT003 if other code changed
        the weights since the last update (`continuity`).

        watch_changes  whether to measure the share of weights that this update changes. The result
                       of the next step contains this share, because the share is read from the
                       device together with the loss of the next step
        """
        check_placed(self.model)
        weight, units = (
            int(n)
            for n in self.world.sum(
                [sum(batch.weight for batch in batches), sum(batch.units for batch in batches)]
            )
        )
        loss_tensor = self.accumulate(batches, weight, sends_gradients=True)
        reduced = self._reduce_across_ranks(loss_tensor)
        if not math.isfinite(reduced.loss):
            raise self.explain_non_finite(
                batches, step=step, quantity="the loss", local_loss=reduced.local_loss
            )
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        norm = reduced.gradient_norm
        has_overflow = not math.isfinite(norm)
        if has_overflow and self.loss_scale is None:
            raise self.explain_non_finite(batches, step=step, quantity="the gradient")
        if self._is_changed_outside:
            self.report_outside_change(step)
        if not has_overflow:
            norm /= scale
            clip = min(1.0, self.train.clip / (norm + 1e-6)) if self.train.clip else 1.0
            self._scale_gradients(clip / scale)
            for group in self.optimizer.param_groups:
                # adapter.plus gives LoRA's B matrices a factor
                group["lr"] = learning_rate * group.get("rate_factor", 1.0)
            previous_values = read_elements(self._sampled_elements) if watch_changes else []
            self.optimizer.step()
            self.share_changed = (
                measure_share_changed(previous_values, read_elements(self._sampled_elements))
                if watch_changes
                else None
            )
        self.accumulator.zero()
        if self.loss_scale:
            self.loss_scale.update(has_overflow=has_overflow, step=step)
        return StepResult(
            loss=reduced.loss,
            gradient_norm=norm,
            units=units,
            weight=weight,
            share_changed=reduced.share_changed,
            has_overflow=has_overflow,
            loss_scale=scale if self.loss_scale else None,
            measures=reduced.measures,
        )

    def _scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients by a factor before the update. Some optimizers multiply the
        gradients themselves, during the update. They read the gradients only once and do not round
        them again.
        """
        if factor == 1.0:
            return
        if type(self.optimizer) is MixedAdamW:
            self.optimizer.gradient_scale = factor
        else:
            torch._foreach_mul_(self.accumulator.gradients(), factor)

    def norm(self) -> float:
        """Returns the norm over the gradients of all trained tensors."""
        (local_norm,) = read_on_host(gradient_norm(self.accumulator.gradients()))
        if self.sharding is None:
            return local_norm
        (square,) = self.world.sum([local_norm**2])
        return _sharded_norm(square, self.sharding)

    def _reduce_across_ranks(self, loss: Tensor) -> ReducedStep:
        """Sums the gradients, the loss and the measures over all processes."""
        gradient_flags: list[bool] = []
        if self.sharding is not None:  # its gradients were summed in the backward
            self.accumulator.sent_dtypes = self.sharding.sent_dtypes()
        else:
            gradient_flags = self.accumulator.reached()
            self.accumulator.finish_sums()
        local = self._read_local_step(loss)
        if self.world.size == 1:
            return local
        if self.sharding is not None:
            total, square, *measures = self.world.sum(
                [local.loss, local.gradient_norm**2, *local.measures]
            )
            norm = _sharded_norm(square, self.sharding)
            return replace(local, loss=total, gradient_norm=norm, measures=measures)
        total, *sums = self.world.sum([local.loss, *gradient_flags, *local.measures])
        counts = sums[: len(gradient_flags)]
        self.accumulator.drop_unreached([count > 0 for count in counts])
        return replace(local, loss=total, measures=sums[len(gradient_flags) :])

    def _read_local_step(self, loss: Tensor) -> ReducedStep:
        """Reads the numbers of this process from the device. This is the only time in a step that
        the process waits for the device.
        """
        measures = [] if self.measure_sums is None else list(self.measure_sums.unbind())
        flags = [] if self.continuity is None else self.continuity.flags
        changed_shares = [] if self.share_changed is None else [self.share_changed]
        self.share_changed = None
        norm = gradient_norm(self.accumulator.gradients())
        local_loss, local_norm, *values = read_on_host(
            loss, norm, *measures, *flags, *changed_shares
        )
        share_changed = values.pop() if changed_shares else None
        self._is_changed_outside = any(values[len(measures) :])
        return ReducedStep(
            local_loss=local_loss,
            loss=local_loss,
            gradient_norm=local_norm,
            share_changed=share_changed,
            measures=values[: len(measures)],
        )

    def explain_non_finite(
        self, batches: Sequence[Batch], *, step: int, quantity: str, local_loss: float | None = None
    ) -> RunError:
        """Returns a RunError NF001 with the name of the module in which a non-finite number appears
        first. If there are several processes, the message comes from the first process that has a
        non-finite weight. If no process has a non-finite weight, the message comes from the first
        process that has a non-finite loss.

        local_loss  the loss of this process
        """
        weights = bool(non_finite_parameters(self.model))
        passes = [partial(self._loss_sum, batch, 1) for batch in batches]
        error = non_finite_error(
            self.model,
            passes,
            step=step,
            quantity=quantity,
            gradient=self.accumulator.gradient,
            learning_rate=self.train.learning_rate,
            clip=self.train.clip,
            compute=self.precision.compute,
        )
        # step 0 is the preflight's: each process runs it alone, unless processes share the model
        if self.world.size == 1 or (step == 0 and self.sharding is None):
            return error
        report = {
            "has_bad_weight": weights,
            "has_bad_loss": local_loss is not None and not math.isfinite(local_loss),
            "message": error.message,
            "fix": error.fix,
        }
        reports = self.world.gather(report)
        # one non-finite weight makes the loss of every process non-finite: its process is named
        # first
        for flag in ("has_bad_weight", "has_bad_loss"):
            for rank, rank_report in enumerate(reports):
                if rank_report[flag]:
                    message = f"{rank_report['message']} (rank {rank})"
                    return RunError(message, code="NF001", fix=rank_report["fix"])
        return RunError(reports[0]["message"], code="NF001", fix=reports[0]["fix"])


def read_on_host(*scalars: Tensor) -> list[float]:
    """Reads the values of 0-d tensors in one transfer, so that the host waits for the device only
    once. The tensors may be on several devices.
    """
    first, *other_scalars = scalars
    values: list[float] = torch.stack(
        [first, *(scalar.to(first) for scalar in other_scalars)]
    ).tolist()
    return values


def _sharded_norm(square: float, sharding: Sharding) -> float:
    """Returns the norm of a gradient that is distributed over processes.

    square  the sum of the squared norms of all processes
    """
    if math.isfinite(square):
        return math.sqrt(square / sharding.replica_count)
    return square


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm over all gradients, computed in fp32."""
    if not gradients:
        return torch.zeros(())
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        norms = torch._foreach_norm(list(gradients))
    elif all(gradient.is_cpu for gradient in gradients):
        norms = _norms_in_chunks(gradients)
    else:
        norms = tuple(
            torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients
        )
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def _norms_in_chunks(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the norms of chunks of the gradients. On a CPU, `vector_norm` would copy a whole
    gradient to fp32 and use much memory. All chunks are copied to the same buffer, because the C
    library would not return the memory of many small copies to the system.
    """
    buffer = torch.empty(_NORM_CHUNK, dtype=torch.float32, device=gradients[0].device)
    norms = []
    for gradient in gradients:
        for part in gradient.reshape(-1).split(_NORM_CHUNK):
            norms.append(torch.linalg.vector_norm(buffer[: part.numel()].copy_(part)))
    return tuple(norms)


def choose_sampled_elements(
    parameters: Sequence[nn.Parameter],
) -> list[tuple[nn.Parameter, Tensor]]:
    """Chooses the elements of the model's parameters that are compared before and after an update.
    The choice is the same in every run. Within a parameter, or within this process's part of a
    sharded parameter, the positions are evenly spaced.
    """
    return [
        (p, torch.linspace(0, n - 1, min(SAMPLED_ELEMENTS, n), device=p.device).long())
        for p in sample_items(parameters, SAMPLED_PARAMETERS)
        if (n := local_part(p).numel())
    ]


@torch.no_grad()
def read_elements(sampled_elements: Sequence[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
    """Copies the sampled elements of the parameters into one tensor for each device and dtype, so
    that comparing them takes a few operators, whatever the number of parameters is.
    """
    elements: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter, index in sampled_elements:
        part = local_part(parameter)
        values = part.flatten().index_select(0, index)
        elements.setdefault((part.device, part.dtype), []).append(values)
    return [torch.cat(values) for values in elements.values()]


def sample_items(items: Sequence[T], count: int) -> list[T]:
    """Draws at most `count` items at random with a fixed seed. The drawn items keep their order.

    The items are not evenly spaced. LoRA's A and B alternate in the list of trained tensors, so
    evenly spaced items could all be A matrices.
    """
    return [
        items[i] for i in sorted(random.Random(0).sample(range(len(items)), min(count, len(items))))
    ]


def measure_share_changed(previous: list[Tensor], current: list[Tensor]) -> Tensor:
    """Returns the share of the sampled elements that an update has changed. It is 1.0 if the update
    changed every element, and 0.0 if rounding removed every change.

    ->  fp32[]   on the first tensor's device
    """
    total = sum(b.numel() for b in previous)
    if not total:
        return torch.zeros(())
    counts = [torch.count_nonzero(b != a) for b, a in zip(previous, current)]
    return torch.stack([count.to(counts[0].device) for count in counts]).sum() / total


def peak_memory(device: torch.device) -> int:
    """Returns the largest number of bytes of memory that were in use. For a GPU, this is the peak
    of PyTorch's allocator. For a CPU, this is the peak resident size of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # on Linux, `getrusage` counts the memory of the process that started this one too
    if peak := status_bytes("VmHWM"):
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def assemble_stepper(
    model: nn.Module,
    train: TrainSection,
    precision: Precision,
    loss_sum: LossSum,
    *,
    adapter: AdapterSection | None = None,
    world: World = ALONE,
    sharding: Sharding | None = None,
) -> Stepper:
    """Builds the gradient accumulator and the optimizer of a model, and the `Stepper` that uses
    them.

    adapter  the section with the learning rates of LoRA's B matrices and of the text encoders; None
             if all weights are trained with `train.learning_rate`
    Other arguments are those of `Stepper`.
    """
    accumulator = GradientAccumulator(
        model.parameters(),
        dtype=precision.grads,
        reduce=precision.reduce,
        sharded_gradients=sharding,
        processes=world if sharding is None else None,
    )
    optimizer = build_optimizer(
        model,
        train,
        precision,
        accumulator.gradient,
        plus=adapter.plus if adapter else None,
        text_rate=adapter.text_encoder_rate if adapter else None,
    )
    return Stepper(model, optimizer, accumulator, precision, train, loss_sum, world, sharding)
