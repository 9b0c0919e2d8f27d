"""One call of an operator in an observed step: what ran, who called it, and what the step knows of its tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ...dtypes import name
from ..precision import Precision
from . import operators as ops
from .callers import ENGINE, Caller, caller
from .kept_casts import Finding, KeptCasts
from .kept_values import KeptValues
from .lineage import Lineages, wide
from .observation import FIX, Observation
from .regions import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE, Regions

# most elements of a tensor that is computed again to check it for loss
SMALL = 1 << 20


class JudgedStep:
    """What the calls of one step share: the declared precision, and records of tensors and of earlier calls.

    role         compute, or generate while tokens are made
    lora_branch  the dtype of the adapters' own products: fp32 beside narrower base products, or None for either
    casts        those whose results are kept since this step or an earlier one
    """

    def __init__(
        self, seen: Observation, precision: Precision, regions: Regions, *, role: str, lora_branch: str | None, casts: KeptCasts
    ) -> None:
        self.seen, self.precision, self.regions, self.role, self.lora_branch = seen, precision, regions, role, lora_branch
        self.compute: str = getattr(precision, role)
        self.lineages = Lineages()
        self.kept = KeptValues()
        self.casts = casts
        self.given = Lineages()  # tensors of a batch: made before the step, and not all of them for the model
        self.pending: dict[int, tuple[str, str, Caller, str]] = {}  # products outside compute until their use is known
        self.routers: set[int] = set()
        self.wide_forward = False
        self.attention_calls: list[torch.dtype] = []
        self.quantiles: list[str] = []  # that run now
        self.entries: list[str] = []  # functions that run now and make a tensor of Python's numbers
        self.numbers_left = False  # whether a value of the model became a Python number
        self.own_numbers: set[str] = set()  # places that make tensors of other numbers
        self.single_numbers: Counter[str] = Counter()  # module -> activations that a program's code read one at a time
        words = {precision.base, precision.trainable, precision.unquantised, precision.compute, precision.generate, "fp32"}
        self.stored = words | {precision.grads, precision.optimizer, precision.reduce, precision.save_model, precision.save_adapter}
        self.allowed = {FORWARD: {self.compute, "fp32"}, LOSS: {self.compute, precision.loss, "fp32"}, UPDATE: {"fp32"}}

    def finish(self) -> None:
        """Reports the products outside `compute` that do not belong to a router."""
        for number, (module, word, by, symbol) in self.pending.items():
            if number in self.routers:
                self.seen.dtypes["router"][word] += 1
            else:
                self.product_outside(module, word, by, symbol)
        self.pending.clear()
        self.casts.finish(self.seen)

    def product_outside(
        self, module: str, word: str, by: Caller, symbol: str, *, declared: str = "", rule: str = "",
        cause: str = "its operands have that dtype, and no autocast narrowed them", fix: str = FIX,
    ) -> None:  # fmt: skip
        """declared  by default `compute`"""
        declared = declared or self.compute
        self.seen.report(
            self.role, f"{symbol} in {module or 'no module'} multiplies in {word}, declared {declared}", symbol=f"{symbol} in {module}",
            observed=word, declared=declared, rule=rule, cause=cause, fix=fix, file=by.file, line=by.line,
        )  # fmt: skip


class Call:
    """One call of an operator: its inputs and outputs, its caller, and the part of the step."""

    def __init__(
        self, step: JudgedStep, op: ops.Operator, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        self.step, self.op, self.func, self.args, self.kwargs = step, op, func, args, kwargs
        self.inputs, self.outputs = inputs, outputs
        self.by = caller(asked=op.kind == ops.CAST)
        self.region = step.regions.now()
        self.module = step.regions.module
        self.seen = step.seen

    def dtype(self) -> str | None:
        """The dtype of the arithmetic: the requested one, else the dtype to which the operands are promoted; None if none is floating."""
        asked = self.kwargs.get("dtype")
        if asked is not None and self.op.kind in (ops.SUM, ops.CREATE):
            return float_word(asked)
        if self.op.name in ("_softmax", "_log_softmax") and len(self.args) > 2 and self.args[2] is True:
            return "fp32"
        floats = [t for t in self.inputs if float_word(t.dtype)]
        if not floats:
            made = [t for t in self.outputs if float_word(t.dtype)]
            return float_word(made[0].dtype) if made else None
        several = [t for t in floats if t.dim()] or floats
        dtype = several[0].dtype
        for tensor in several[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype) if self.op.kind != ops.PRODUCT else dtype
        return float_word(dtype)

    @property
    def symbol(self) -> str:
        return self.op.foreign or self.op.name

    def role(self) -> str:
        return {LOSS: "loss", BACKWARD: "grads", GRADIENTS: "grads", UPDATE: "optimizer"}.get(self.region, self.step.role)

    def in_a_position_table(self) -> bool:
        """Whether this runs where diffusers computes positions in fp64 and returns them in fp32: in a module without weights, or in the
        functions that its patch embeddings call."""
        module = self.step.regions.stack[-1].module if self.step.regions.stack else None
        if module is None or not type(module).__module__.startswith("diffusers."):
            return False
        return next(module.parameters(), None) is None or self.by.file.endswith("diffusers/models/embeddings.py")

    def report(self, role: str, message: str, *, observed: str, cause: str, declared: str = "", rule: str = "") -> None:
        message, why = self._told(message, observed=observed, cause=cause, declared=declared, rule=rule)
        self.seen.report(role, message, **why)

    def report_where_read(self, role: str, message: str, word: str, *, cause: str, declared: str) -> None:
        """Reports a cast of a program's own to `word` where something reads its result; now, where that cannot be followed."""
        told, why = self._told(message, observed=word, cause=cause, declared=declared, rule="")
        place, graded = f"{short_name(self.by.file)}:{self.by.line}", any(tensor.requires_grad for tensor in self.inputs)
        if not self.step.casts.add(self.outputs[0], Finding(role, told, why, word, self.module or self.region, place, graded)):
            self.seen.report(role, told, **why)

    def _told(self, message: str, *, observed: str, cause: str, declared: str, rule: str) -> tuple[str, dict[str, Any]]:
        """What `Observation.report` is given: the message with its place, and the rest."""
        place = f" at {short_name(self.by.file)}:{self.by.line}" if self.by.kind != ENGINE else ""
        where = self.module or self.region
        why = {"symbol": where, "observed": observed, "declared": declared, "rule": rule, "cause": cause}
        return f"{message} ({where}{place})", {**why, "file": self.by.file, "line": self.by.line}

    def unobserved(self, key: str, why: str) -> None:
        self.seen.unobserved.setdefault(key, why)


def float_word(dtype: torch.dtype) -> str | None:
    """The word of a floating or complex dtype, else None."""
    real = wide(dtype)
    return name(real) if real.is_floating_point else None


def short_name(file: str) -> str:
    return file.rsplit("/", 1)[-1]
