"""Marks numbers that were rounded when they were made: fills, ramps and Python's numbers, in a dtype that their role does not have.

No cast shows this rounding, and arithmetic with wider values widens the numbers without one (`y * torch.full(shape, 0.9, dtype=bf16)`).
Numbers that the dtype holds exactly, as 0, 1, 0.5 and -inf, lose nothing. The bound that a mask is filled with is no value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes import itemsize, name
from ...libraries import of_a_library
from . import operators as ops
from .call import Call, JudgedStep, float_word, short_name
from .callers import ENGINE, OPTIMIZER, OURS, PRACTICE, Caller
from .lineage import BUFFER, KEPT, MADE, Lineage, Mark, plain_tensors, readable
from .regions import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE

_RAMPS = frozenset(("arange", "range", "linspace", "logspace"))
# functions that make a tensor of Python's numbers, or write one into it, and which argument is the numbers
_GIVEN = {"tensor": 0, "as_tensor": 0, "asarray": 0, "new_tensor": 1, "__setitem__": 2}
ENTRIES = frozenset(_GIVEN)
_BOUND = 1e4
# bits of the fraction of a kept number that may be meant so
_MEANT = {"bf16": 4, "fp16": 6}
_SAMPLE = 4096


def judge_numbers(call: Call, made: Lineage) -> Lineage:
    """The record of a result, with a mark where the operator's own numbers were rounded."""
    if call.op.kind not in (ops.CREATE, ops.EXACT) or not call.outputs or _of_a_library(call.by) or readable(call.outputs[0]) is None:
        return made
    dtype, ramp = call.outputs[0].dtype, call.op.name in _RAMPS
    if not is_foreign(call.step, call.region, dtype, table=ramp):
        return made
    if call.op.name in ("fill", "zero") and _covers_its_storage(call.outputs[0]):
        value = call.step.lineages.of(call.args[1]) if isinstance(call.args[-1], Tensor) and call.op.name == "fill" else None
        made = replace(made, marks=value.marks if value is not None else ())
    rounded = _rounded_ramp(call) if ramp else any(_rounds(number, dtype) and _holds(call, number) for number in _numbers(call))
    return with_mark(made, MADE, call.op.name, dtype, call.module, call.by) if rounded else made


def judge_entered(step: JudgedStep, called: str, args: Any, kwargs: Any, made: Tensor, by: Caller) -> None:
    """Marks a tensor that `torch.tensor` and its relatives made of Python's numbers, or into which such a number was written."""
    given = args[_GIVEN[called]] if len(args) > _GIVEN[called] else kwargs.get("data", kwargs.get("obj"))
    several = not isinstance(given, int | float | complex) and made.numel() > 1
    if isinstance(given, Tensor) or _of_a_library(by) or not is_foreign(step, step.regions.now(), made.dtype, table=several):
        return
    known = step.lineages.of(made)
    if known is None and made.numel() > 1:
        return  # it holds values of the model that became numbers, which is said
    exact = torch.tensor(given, dtype=torch.float32)
    lost = exact.isfinite() & (exact.abs() < _BOUND) & (exact != exact.to(made.dtype).float())
    if bool(lost.any()):
        step.lineages.set(made, with_mark(known or Lineage(BUFFER), MADE, called.strip("_"), made.dtype, step.regions.module, by))


def kept_number(call: Call, tensor: Tensor) -> Lineage:
    """The record of numbers that no operator of the step made."""
    foreign = is_foreign(call.step, call.region, tensor.dtype) and not _of_a_library(call.by)
    if call.step.entries or not foreign or not looks_rounded(tensor):
        return Lineage(BUFFER)
    return with_mark(Lineage(BUFFER), KEPT, call.op.name, tensor.dtype, call.module, call.by)


def kept_in_attribute(step: JudgedStep, module: nn.Module, full: str, table: Tensor) -> Lineage:
    """The record of a tensor that a module keeps in a plain attribute since before the step."""
    kept = Lineage(BUFFER)
    if of_a_library(type(module)) or not is_foreign(step, FORWARD, table.dtype) or not looks_rounded(table):
        return kept
    return with_mark(kept, KEPT, "attribute", table.dtype, full, full)


def is_foreign(step: JudgedStep, region: str, dtype: torch.dtype, *, table: bool = False) -> bool:
    """Whether a dtype is narrower than fp32, and not the one of what is computed in this region.

    table  it holds different numbers: such a table is fp32 whatever `compute` is
    """
    precision, word = step.precision, float_word(dtype)
    if word is None or itemsize(word) >= 4:
        return False
    declared = {
        FORWARD: () if table else (step.compute,), LOSS: (precision.loss,), BACKWARD: (step.compute, precision.grads),
        GRADIENTS: (precision.grads,), UPDATE: (precision.trainable, precision.optimizer),
    }  # fmt: skip
    return word not in declared[region]


def looks_rounded(tensor: Tensor) -> bool:
    """Whether numbers that were made before the step use more bits of their narrow dtype than a number that is meant so."""
    values = readable(tensor.detach())
    if values is None or not values.numel():
        return False
    word = name(values.dtype)
    values = values.reshape(-1)[:_SAMPLE].float()
    values = values[values.isfinite() & (values.abs() < _BOUND) & (values != values.round())]
    return bool((values.view(torch.int32) & ((1 << (23 - _MEANT.get(word, 1))) - 1)).any())


def with_mark(made: Lineage, kind: str, operator: str, dtype: torch.dtype, module: str, at: Caller | str) -> Lineage:
    place = at if isinstance(at, str) else f"{short_name(at.file)}:{at.line}"
    return replace(made, marks=(*made.marks, Mark(kind, operator, name(dtype), module, place, True)))


def _of_a_library(by: Caller) -> bool:
    return by.kind in (OURS, PRACTICE, ENGINE, OPTIMIZER)


def _numbers(call: Call) -> list[Any]:
    """The numbers that an operator writes: its arguments of the type Scalar, and single numbers in a wider tensor."""
    schema = getattr(call.func, "_schema", None)
    names = [a.name for a in schema.arguments if "number" in str(a.type)] if schema is not None else []
    places = [a.name for a in schema.arguments] if schema is not None else []
    given = {**dict(zip(places, call.args)), **call.kwargs}
    found = [given[key] for key in names if isinstance(given.get(key), int | float | complex)]
    own = call.outputs[0]
    wider = [t for t in call.inputs if not t.dim() and t.is_floating_point() and t.itemsize > own.itemsize and not t.is_meta]
    return found + [float(t) for t in wider if own.dim()]


def _holds(call: Call, number: complex) -> bool:
    """Whether the number is in the result: the bound of a clamp may be in none."""
    own = call.outputs[0]
    return call.op.kind == ops.CREATE or bool((own == torch.tensor(number).to(own)).any())


def _rounds(number: complex, dtype: torch.dtype) -> bool:
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return any(_rounds_real(float(part), dtype) for part in parts)


def _rounds_real(number: float, dtype: torch.dtype) -> bool:
    if not math.isfinite(number) or abs(number) >= _BOUND:
        return False
    real = dtype.to_real() if dtype.is_complex else dtype
    exact = torch.tensor(number, dtype=torch.float32)
    return bool(exact != exact.to(real).float())


def _rounded_ramp(call: Call) -> bool:
    """Whether the same ramp in fp32 has other values."""
    own = call.outputs[0]
    out = {"out": torch.empty_like(own, dtype=torch.float32)} if "out" in call.kwargs else {"dtype": torch.float32}
    try:
        exact = call.func(*call.args, **{**call.kwargs, **out})
    except (RuntimeError, TypeError):
        return True
    return not torch.equal(plain_tensors(exact, [])[0], own.float())


def _covers_its_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
