"""One optimizer step: accumulates gradients over micro-batches, normalised by their weight, checks,
clips, updates, and measures the share of weights that changed.
"""

from __future__ import annotations

import math
import random
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..config.schema import TrainSection
from ..distributed.shard import Sharding
from ..distributed.world import ALONE, World
from ..errors import RunError
from ..observe.continuity import Continuity
from ..optimize import check_placed
from ..precision.accumulate import GradientAccumulator
from ..precision.parts import local_part
from ..precision.precision import Precision
from .finite import non_finite_error, non_finite_parameters
from .task import Batch, Idle, LossSum

# the sample for `share changed`: precise to 1%, a few kilobytes
SAMPLED_PARAMETERS = 32
SAMPLED_ELEMENTS = 256
# of dynamic loss scaling
INITIAL = 2.0**16
# steps without overflow before the scale doubles; torch.amp.GradScaler's default
GROWTH_INTERVAL = 2000
SMALLEST = 1.0  # below this the gradients themselves do not fit fp16
T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """loss: mean over `weight`; measures: the task's other means, in its order; units: tokens or
    pictures seen; share_changed: of weights, by the update before this step's, None if that was not
    watched; overflow: fp16 skipped the update; loss_scale: what this step's loss was multiplied by,
    None without loss scaling.
    """

    loss: float
    gradient_norm: float
    units: int
    weight: int
    share_changed: float | None
    overflow: bool = False
    loss_scale: float | None = None
    measures: Sequence[float] = ()


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16: `scale` multiplies the loss, doubles after `quiet` steps
    without overflow, halves on overflow.
    """

    scale: float = INITIAL
    quiet: int = 0

    def update(self, *, overflow: bool, step: int) -> None:
        """Raises  RunError FP001 when the scale has fallen below 1: halving will not help any more."""
        if overflow:
            self.scale = self.scale / 2
            self.quiet = 0
            if self.scale < SMALLEST:
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
    """Runs optimizer steps. Only it changes the trainable weights, the optimizer, the gradients and
    the loss scale.
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
        loss_sum  a task's own, in the dtype of `precision.loss`
        world     the processes that share a step: each computes its own micro-batches, and all make
                  the same update
        sharding  how the model is distributed over them; None: each has the whole model
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
        self.loss_dtype: torch.dtype | None = None  # as the last forward gave it, for the observer
        self.measured: Tensor | None = None
        # what the last update left, and what is called with the step, before its update, where that
        # has changed since
        self.carried: Continuity | None = None
        self.judge_difference: Callable[[int], None] = lambda step: None
        self._differed = False
        self._sampled = sampled_elements(accumulator.parameters)
        # the share that the last watched update changed, until the next step reads it with its loss
        self.changed: Tensor | None = None

    def accumulate(
        self, batches: Sequence[Batch], weight: int | None = None, *, for_all: bool = False
    ) -> Tensor:
        """Forward and backward of every micro-batch; returns their losses, summed, over `weight`:
        by default their own weights. What a task measures beside its loss is kept in `measured`,
        summed and divided in the same way.

        for_all  every process does the same now: gradients are sent while the last backward
                 computes the rest
        """
        weight = max(1, sum(b.weight for b in batches) if weight is None else weight)
        total: Tensor | None = None
        self.measured = None
        for number, batch in enumerate(batches, 1):
            loss = self._loss_sum(batch, weight)
            if loss.dim():
                measured = loss[1:].detach().float()
                if self.measured is None:
                    self.measured = measured
                else:
                    self.measured = self.measured + measured
                loss = loss[0]
            self.loss_dtype = loss.dtype
            loss = loss.float()
            if for_all and number == len(batches):
                self.accumulator.begin_sums()
            (loss * self.loss_scale.scale if self.loss_scale else loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step has at least one micro-batch"
        return total

    def _loss_sum(self, batch: Batch, divisor: int) -> Tensor:
        own = batch.batch if isinstance(batch, Idle) else batch
        loss = self.loss_sum(self.model, own, divisor)
        return loss * 0.0 if isinstance(batch, Idle) else loss

    def __call__(
        self, batches: Sequence[Batch], *, step: int, learning_rate: float, watch_changes: bool
    ) -> StepResult:
        """Runs one step. Raises, before any weight changes, RunError NF001 for a non-finite loss or
        (without loss scaling) gradient, and DtypeError DT003 where something changed the weights
        since the last update (`carried`).

        watch_changes  the next step's result has the share of weights that this update changed: it
                       is read with that step's loss
        """
        check_placed(self.model)
        weight, units = (
            int(n)
            for n in self.world.sum([sum(b.weight for b in batches), sum(b.units for b in batches)])
        )
        loss_tensor = self.accumulate(batches, weight, for_all=True)
        own_loss, loss, norm, changed, measures = self._add_up(loss_tensor)
        if not math.isfinite(loss):
            raise self.non_finite(batches, step=step, what="the loss", own=own_loss)
        scale = self.loss_scale.scale if self.loss_scale else 1.0
        overflow = not math.isfinite(norm)
        if overflow and self.loss_scale is None:
            raise self.non_finite(batches, step=step, what="the gradient")
        if self._differed:
            self.judge_difference(step)
        if not overflow:
            norm /= scale
            clip = min(1.0, self.train.clip / (norm + 1e-6)) if self.train.clip else 1.0
            if clip != 1.0 or scale != 1.0:
                torch._foreach_mul_(self.accumulator.gradients(), clip / scale)
            for group in self.optimizer.param_groups:
                # of B's matrices, with adapter.plus
                group["lr"] = learning_rate * group.get("rate_factor", 1.0)
            before = self._look() if watch_changes else []
            self.optimizer.step()
            self.changed = share_changed(before, self._look()) if watch_changes else None
        self.accumulator.zero()
        if self.loss_scale:
            self.loss_scale.update(overflow=overflow, step=step)
        return StepResult(
            loss,
            norm,
            units,
            weight,
            changed,
            overflow,
            scale if self.loss_scale else None,
            measures,
        )

    def norm(self) -> float:
        """The norm of the whole gradient."""
        (own,) = read_on_host(gradient_norm(self.accumulator.gradients()))
        if self.sharding is None:
            return own
        (square,) = self.world.sum([own**2])
        return _norm_of_parts(square, self.sharding)

    def _add_up(self, loss: Tensor) -> tuple[float, float, float, float | None, list[float]]:
        """Makes the gradients those of all processes; returns this process's own loss, that of all,
        the norm of the whole gradient, the share that the last watched update changed, and what the
        task measures.
        """
        reached: list[bool] = []
        if self.sharding is not None:  # its gradients were summed in the backward
            self.accumulator.sent = self.sharding.sent()
        else:
            reached = self.accumulator.reached()
            self.accumulator.finish_sums()
        # the one wait for the device in a step; gradients that no process has are zeros here
        measured = () if self.measured is None else self.measured.unbind()
        carried = [] if self.carried is None else self.carried.flags
        last = [] if self.changed is None else [self.changed]
        self.changed = None
        own, norm, *measures = read_on_host(
            loss, gradient_norm(self.accumulator.gradients()), *measured, *carried, *last
        )
        changed = measures.pop() if last else None
        self._differed = any(measures[len(measured) :])
        measures = measures[: len(measured)]
        if self.world.size == 1:
            return own, own, norm, changed, measures
        if self.sharding is not None:
            total, square, *measures = self.world.sum([own, norm**2, *measures])
            return own, total, _norm_of_parts(square, self.sharding), changed, measures
        total, *counts = self.world.sum([own, *reached, *measures])
        self.accumulator.drop_unreached([count > 0 for count in counts[: len(reached)]])
        return own, total, norm, changed, counts[len(reached) :]

    def _look(self) -> list[Tensor]:
        return [local_part(p).detach().flatten()[index] for p, index in self._sampled]

    def non_finite(
        self, batches: Sequence[Batch], *, step: int, what: str, own: float | None = None
    ) -> RunError:
        """NF001 with the module where a non-finite number appears first.

        own  with several processes, this one's loss: the message is that of the first process that
             holds such a weight, else of the first whose loss is not finite
        """
        weights = bool(non_finite_parameters(self.model))
        passes = [partial(self._loss_sum, batch, 1) for batch in batches]
        error = non_finite_error(
            self.model,
            passes,
            step=step,
            quantity=what,
            gradient=self.accumulator.gradient,
            learning_rate=self.train.learning_rate,
            clip=self.train.clip,
            compute=self.precision.compute,
        )
        # step 0 is the preflight's, which each process has for itself, unless they share the model
        if self.world.size == 1 or (step == 0 and self.sharding is None):
            return error
        found = self.world.gather(
            [weights, own is not None and not math.isfinite(own), error.message, error.fix]
        )
        # a weight that is not finite makes every process's loss so
        rank = next((rank for what in (0, 1) for rank, one in enumerate(found) if one[what]), 0)
        *here, message, fix = found[rank]
        return RunError(message + (f" (rank {rank})" if any(here) else ""), code="NF001", fix=fix)


def read_on_host(*scalars: Tensor) -> list[float]:
    """Values of 0-d tensors, which may lie on several devices, in one transfer: the host waits for
    the device once.
    """
    first, *others = scalars
    values: list[float] = torch.stack([first, *(other.to(first) for other in others)]).tolist()
    return values


def _norm_of_parts(square: float, sharding: Sharding) -> float:
    """`square`: the squares of all processes' norms, summed."""
    if math.isfinite(square):
        return math.sqrt(square / sharding.replicas)
    return square


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm over all gradients, computed in fp32."""
    if not gradients:
        return torch.zeros(())
    if all(g.dtype == torch.float32 for g in gradients):
        norms = torch._foreach_norm(list(gradients))
    else:
        norms = tuple(torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def sampled_elements(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Elements at fixed positions, the same in every run: of some of the model's parameters, and
    spread evenly over each of these, of which a sharded one has only some here.
    """
    return [
        (p, torch.linspace(0, n - 1, min(SAMPLED_ELEMENTS, n), device=p.device).long())
        for p in spread(parameters, SAMPLED_PARAMETERS)
        if (n := local_part(p).numel())
    ]


def spread(things: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, in their order, drawn with a fixed seed.

    Trained tensors repeat from layer to layer, and LoRA's A and B alternate: at a fixed distance
    all of the sample can be of one kind.
    """
    return [
        things[i]
        for i in sorted(random.Random(0).sample(range(len(things)), min(most, len(things))))
    ]


def share_changed(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """fp32[], on the first tensor's device: the share of sampled elements that differ: 1.0 when
    every update changed its weight, 0.0 when all updates were rounded away.
    """
    total = sum(b.numel() for b in before)
    if not total:
        return torch.zeros(())
    counts = [torch.count_nonzero(b != a) for b, a in zip(before, after)]
    return torch.stack([count.to(counts[0].device) for count in counts]).sum() / total


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's peak on a GPU, the process's peak resident size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
