"""The dispatch mode of an observed step: it shows each operator that runs to `judge`, after it has run unchanged."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...dtypes import name
from ..own_optimizer import kept_beside_states
from ..own_part import gathered_weights
from ..precision import Precision
from . import operators as ops
from .attributes import kept_in_attributes
from .call import JudgedStep
from .function_caches import cached_tables
from .judge import Judge
from .kept_casts import KeptCasts
from .lineage import BUFFER, FLOAT_INPUT, INPUT, NOTHING, STATE, WEIGHT, Lineage, plain_tensors
from .made_narrow import kept_in_attribute
from .observation import Observation
from .regions import Regions


class Arithmetic(TorchDispatchMode):
    """Judges every operator that runs while the mode is active.

    role         compute, or generate while tokens are made
    lora_branch  the dtype of the adapters' own products: fp32 beside narrower base products, or None for either
    casts        those whose results are kept since an earlier step
    paused       whether code runs that is not of the step
    """

    paused = False
    supports_higher_order_operators = True

    def __init__(
        self, seen: Observation, precision: Precision, regions: Regions, *, role: str, lora_branch: str | None, casts: KeptCasts
    ) -> None:
        super().__init__()
        self.step = JudgedStep(seen, precision, regions, role=role, lora_branch=lora_branch, casts=casts)
        self.lineages = self.step.lineages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else PyTorch wraps this mode and imports its compiler: a second and 148 MiB in a run that compiles nothing
        return False

    def know(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Registers the tensors that exist before a step: weights, buffers, tensors in plain attributes and caches, optimizer states."""
        for parameter in model.parameters():
            self.lineages.set(parameter, Lineage(WEIGHT))
            if parameter.grad is not None:
                self.lineages.set(parameter.grad, Lineage(WEIGHT))
            state = getattr(parameter, "quant_state", None)
            while state is not None:  # a quantised weight's scales, which may be quantised themselves
                for tensor in plain_tensors(list(vars(state).values()), []):
                    self.lineages.set(tensor, Lineage(WEIGHT))
                state = getattr(state, "state2", None)
        for weight in gathered_weights(model):
            self.lineages.set(weight, Lineage(WEIGHT))
        for buffer in model.buffers():
            self.lineages.set(buffer, Lineage(BUFFER))
            if name(buffer.dtype) == self.step.compute != "fp32":
                self.step.kept.follow(buffer)
        for path, module in model.named_modules():
            for attribute, table in kept_in_attributes(module):
                self.lineages.set(table, kept_in_attribute(self.step, module, f"{path}.{attribute}".lstrip("."), table))
        for table in cached_tables(model):
            self.lineages.set(table, Lineage(BUFFER))
        if optimizer is not None:
            kept = [tensor for _, tensor in kept_beside_states(optimizer)]
            for tensor in plain_tensors([dict(s) for s in optimizer.state.values()], kept):
                self.lineages.set(tensor, Lineage(STATE))

    def know_inputs(self, given: Any) -> None:
        """Registers the inputs of the model."""
        for tensor in plain_tensors(given, []):
            before = self.lineages.of(tensor)
            # floats made in the step of nothing that the model has, as noised latents are, are inputs too
            if before is None or not before.from_ or not tensor.is_floating_point():
                made = before or NOTHING
                self.lineages.set(tensor, replace(made, from_=made.from_ | (FLOAT_INPUT if tensor.is_floating_point() else INPUT)))

    def know_batch(self, given: Any) -> None:
        """Registers the batch of a step: what only its loss reads, as log-probabilities of a reference, did not come from outside."""
        for tensor in plain_tensors(given, []):
            self.step.given.set(tensor, NOTHING)

    def finish(self) -> None:
        """Reports what could only be judged at the end of the step."""
        self.step.finish()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.paused:
            return out
        with torch._C.DisableTorchFunction():
            self._look(func, args, kwargs or {}, out)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        op = ops.operator(func)
        inputs, outputs = plain_tensors([args, kwargs], []), plain_tensors(out, [])
        self.step.casts.see(op, args, kwargs, inputs, outputs, self.step.seen)
        if self.step.role == "generate" and not self.step.regions.stack:
            return  # the loop around the model: a sampler's choice of a token, a pipeline's scheduler and VAE
        judge = Judge(self.step, op, func, args, kwargs, inputs, outputs)
        try:
            judge.judge()
            self.step.kept.see(op, func, args, kwargs, inputs, outputs, self.lineages)
        except Exception as error:  # such as a tensor whose kind lacks an operator that the look needs; the program goes on
            first = "".join(str(error).splitlines()[:1])
            judge.unobserved(f"{op.name} in {judge.module or judge.region}", f"looking at its tensors failed: {first}")


class _BesideCompiler(Arithmetic):
    """The same mode, hidden from PyTorch's compiler, which would otherwise compile the mode itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


def arithmetic_mode(*given: Any, **named: Any) -> Arithmetic:
    """Makes the `Arithmetic` mode; the class depends on whether this process has loaded PyTorch's compiler."""
    return (_BesideCompiler if "torch._dynamo" in sys.modules else Arithmetic)(*given, **named)
