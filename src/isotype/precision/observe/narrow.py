"""Judges arithmetic in narrow dtypes: losses, gradients, norms, sums and tables."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...dtypes import itemsize
from ..apply import is_norm
from . import operators as ops
from .call import SMALL, Call, short_name
from .callers import ENGINE, OURS, PRACTICE, USER
from .lineage import WEIGHT, Lineage, Mark, plain_tensors, readable
from .observation import TABLES
from .regions import BACKWARD, FORWARD, GRADIENTS, LOSS, UPDATE

_TERMS = 4


def judge_arithmetic(call: Call, dtype: str, made: Lineage) -> Lineage:
    """Judges arithmetic and returns the record of its result, with a mark where a sum or a table was computed in a narrow dtype."""
    op, by, region, precision = call.op, call.by, call.region, call.step.precision
    narrow = itemsize(dtype) < 4
    if op.kind == ops.EXACT:
        return made
    norm = call.step.regions.inside(is_norm) if region == FORWARD else None
    if norm is not None and op.name in ops.NORM_SUMS:
        norm.sums.setdefault(dtype, by)
    if region == FORWARD and made.activation:
        made = replace(made, marks=tuple(m for m in made.marks if m.kind == "reduced"))
    if op.name in ("remainder", "fmod") and by.kind == USER and made.activation:
        call.unobserved(
            f"values modulo a number in {call.module or region}",
            f"{short_name(by.file)}:{by.line} takes the rest of a division: whether it is taken off again, which rounds, is not seen",
        )
    # libraries divide positions and counts; a program that does it to activations rounds them
    divides = op.name == "floor_divide" or (op.name == "div" and call.kwargs.get("rounding_mode") is not None)
    rounds = made.activation and by.kind == USER if divides else made.data or region in (BACKWARD, GRADIENTS, UPDATE)
    if op.name in ops.OF_TWO and call.outputs and call.outputs[0].shape[-1:] in ((), (1,)):
        rounds = False  # one power of two for a row is a scale, and multiplies exactly
    if (op.kind == ops.ROUND or divides) and by.kind != OURS and rounds:
        role = call.role()
        call.report(
            role, f"{op.name} puts values on a grid", observed="a grid", declared=getattr(precision, role), cause="quantised in place"
        )
    if by.kind == OURS or (by.kind == ENGINE and region == BACKWARD):
        return made
    if _of_the_loss(call) and made.activation and itemsize(dtype) < itemsize(precision.loss):
        _report_narrower(call, "loss", dtype, precision.loss)
    if not narrow:
        if region == FORWARD and norm is None and made.activation and itemsize(dtype) > itemsize(call.step.compute):
            call.seen.widened[f"{op.name} in {call.module}", dtype] += 1
        return made
    if region == BACKWARD:
        made = replace(made, added=made.added + (op.name in ("add", "sub", "addcmul", "lerp")))
        # up to _TERMS additions are a formula; more are a sum written as a loop
        if (op.kind == ops.SUM or made.added > _TERMS) and itemsize(dtype) < itemsize(precision.grads):
            _report_narrower(call, "grads", dtype, precision.grads)
        return made
    if region != FORWARD:
        return made
    if by.kind == PRACTICE:
        return made
    if made.activation and norm is None and op.name in ops.NORMALISING and itemsize(dtype) < itemsize(precision.norms):
        _report_narrower(call, "norms", dtype, precision.norms)
    place = f"{short_name(by.file)}:{by.line}"
    if made.activation:
        if op.kind == ops.SUM and op.name not in ops.WIDE_INSIDE:
            anywhere = op.name in ops.NAMED_SUMS
            return replace(made, marks=(*made.marks, Mark("reduced", op.name, dtype, call.module, place, anywhere)))
        return made
    if not made.from_ & WEIGHT and _inexact(call):
        if op.name in ops.CURVED and max((t.numel() for t in call.outputs), default=0) > 1:
            call.report(call.step.role, f"{op.name} is computed in {dtype}", observed=dtype, rule=TABLES, cause="narrower than its rule")
        return replace(made, marks=(*made.marks, Mark("table", op.name, dtype, call.module, place, True)))
    return made


def _inexact(call: Call) -> bool:
    """Whether the same operator on widened operands gives different values."""
    if (call.op.writes and any(call.op.writes)) or not call.outputs or call.outputs[0].numel() > SMALL:
        return True
    try:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, _widened, (call.args, call.kwargs))
        exact = call.func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return True
    wide, own = readable(plain_tensors(exact, [])[0]), readable(call.outputs[0])
    return wide is None or own is None or wide.shape != own.shape or not torch.equal(wide.float().nan_to_num(), own.float().nan_to_num())


def _report_narrower(call: Call, role: str, dtype: str, declared: str) -> None:
    call.report(
        role,
        f"{call.op.name} is computed in {dtype}, declared {declared}",
        observed=dtype,
        declared=declared,
        cause="narrower than its role",
    )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _of_the_loss(call: Call) -> bool:
    """Whether this computes the loss: after forward, or in the forward of a model that is given labels.

    A part of the model that has weights takes a log-softmax or a logsumexp of its own values (scores, a router's). Code of transformers
    has losses of its own in layers.
    """
    if call.region != FORWARD:
        return call.region == LOSS
    if call.op.name in ops.LOG_SUMS and call.step.regions.in_a_part():
        return False
    in_a_familys_layer = call.by.kind == PRACTICE and any(part.isdigit() for part in call.module.split("."))
    return call.op.name in ops.LOSSES and not in_a_familys_layer
