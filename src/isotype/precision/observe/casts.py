"""Judges casts and widened operands: which precision is lost, and which earlier loss a wider dtype hides."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...dtypes import itemsize, name
from ..apply import is_norm
from .call import SMALL, Call, float_word, short_name
from .callers import ENGINE, OURS, PRACTICE
from .lineage import KEPT, MADE, NOTHING, Lineage, Mark, readable
from .regions import BACKWARD, FORWARD, GRADIENTS, UPDATE


def judge_cast(call: Call, made: Lineage) -> Lineage:
    """Judges a cast, or a copy into another dtype: which precision it loses, and which earlier loss it hides."""
    target, source = (call.args[0], call.args[1]) if call.op.name == "copy" and len(call.args) > 1 else (call.outputs[0], call.args[0])
    if not isinstance(source, Tensor) or not isinstance(target, Tensor):
        return made
    lineage = call.step.lineages.of(source) or NOTHING
    before, after = float_word(source.dtype), float_word(target.dtype)
    if before and after is None and target.dtype != torch.bool and not target.is_complex():
        return replace(lineage, integers=lineage.integers or lineage.data)
    if after and before is None:
        if lineage.integers and _chosen(source):
            return lineage  # zeros and ones: a choice is no value, and only what is multiplied by it may stand for one
        if lineage.integers and call.by.kind != OURS:
            call.report(
                call.role(), f"values pass through {name(source.dtype)}", observed=name(source.dtype),
                declared=getattr(call.step.precision, call.role()), cause="quantised and widened again",
            )  # fmt: skip
        return replace(lineage, integers=False)
    if not before or not after:
        return lineage
    if itemsize(after) > itemsize(before):
        _report_hidden_loss(call, lineage, before, after)
        return replace(lineage, marks=())
    if itemsize(after) < itemsize(before) and _loses(call, source, target, lineage, after):
        mark = Mark("rounded", call.op.name, after, call.module, f"{short_name(call.by.file)}:{call.by.line}", True)
        return replace(lineage, marks=(*lineage.marks, mark))
    return lineage


def judge_widened_operands(call: Call, known: list[tuple[Tensor, Lineage | None]], dtype: str) -> None:
    """Judges operands that the arithmetic widens without a cast."""
    for tensor, lineage in known:
        word = float_word(tensor.dtype)
        if lineage is not None and lineage.marks and word and word != dtype and itemsize(word) <= itemsize(dtype):
            _report_hidden_loss(call, lineage, word, dtype)


def judge_narrow_write(call: Call, dtype: str, made: Lineage) -> Lineage:
    """Judges arithmetic in `dtype` whose result is written into a narrower tensor (`running.add_(fp32)`, `out=`): a cast without a cast."""
    into_first = bool(call.op.writes) and call.op.writes[0]
    after = float_word(call.outputs[0].dtype) if call.outputs and (into_first or "out" in call.kwargs) else None
    if after is None or itemsize(after) >= itemsize(dtype) or call.by.kind in (OURS, ENGINE):
        return made
    precision = call.step.precision
    if call.region == FORWARD and (call.by.kind == PRACTICE or (made.activation and after == call.step.compute)):
        return made
    declared = {BACKWARD: (precision.grads,), GRADIENTS: (precision.grads,), UPDATE: (precision.trainable, precision.optimizer)}
    if after in declared.get(call.region, ()):
        return made
    mark = Mark("rounded", call.op.name, after, call.module, f"{short_name(call.by.file)}:{call.by.line}", True)
    return replace(made, marks=(*made.marks, mark))


def _loses(call: Call, source: Tensor, target: Tensor, lineage: Lineage, after: str) -> bool:
    """Whether to record that this value was narrowed. Activations are declared to be `compute`, so for them it is no loss."""
    # a layer that is recomputed past its hooks runs in backward
    if call.by.kind in (OURS, ENGINE) or (call.by.kind == PRACTICE and call.region in (FORWARD, BACKWARD)):
        return False
    if call.region == FORWARD and lineage.activation and after == call.step.compute:
        return False
    if after == "fp32" and call.in_a_position_table():
        return False
    if lineage.data or source.numel() > SMALL:
        return True
    own, narrowed = readable(source), readable(target)
    if own is None or narrowed is None:
        return True
    own = own.expand_as(narrowed)  # a copy may repeat its source
    finite = own.isfinite() & narrowed.isfinite()
    return not torch.equal(own[finite], narrowed[finite].to(own.dtype))


def _chosen(source: Tensor) -> bool:
    """Whether integers are rows of zeros with a one, as the choice of an entry is written."""
    values = readable(source)
    if values is None or values.dim() < 2 or values.shape[-1] < 2:
        return False
    return bool((values.sum(-1) == 1).all()) and bool((values.abs().sum(-1) == 1).all())


def _report_hidden_loss(call: Call, lineage: Lineage, before: str, after: str) -> None:
    """Reports that a value with a recorded loss is widened: from here on its dtype hides the loss."""
    if call.region == FORWARD and call.by.kind == OURS:
        return
    in_norm = call.region == FORWARD and call.step.regions.inside(is_norm) is not None
    for mark in lineage.marks:
        number = mark.kind in (MADE, KEPT)
        if in_norm and not number:
            continue  # a norm's own sums are judged by `norms`
        if number and call.region == BACKWARD and call.by.kind == ENGINE:
            continue  # as in the forward, where it is told
        if mark.kind == "reduced" and not mark.anywhere and mark.module != call.module:
            continue
        if itemsize(mark.dtype) >= itemsize(after) and not (number and mark.dtype == before):
            continue  # a dtype that holds what was kept hides nothing: fp64 rounded to fp32, then bf16, then fp32
        if call.region == BACKWARD and call.by.kind in (ENGINE, OURS) and mark.module and mark.dtype == call.step.compute:
            continue  # backward multiplies gradients by a weight or table that the forward narrowed to `compute`, as it was declared
        what = {
            "rounded": "values were rounded to",
            "reduced": f"{mark.operator} was computed in",
            "table": f"{mark.operator} was computed in",
            MADE: f"numbers of {mark.operator} were rounded to",
            KEPT: "numbers are kept in",
        }
        used = "widened to" if itemsize(mark.dtype) < itemsize(after) else "used in"
        role = call.role()
        call.report(
            role, f"{what[mark.kind]} {mark.dtype} at {mark.place} and {used} {after}", observed=f"{mark.dtype}, {used} {after}",
            declared=getattr(call.step.precision, role), cause="the wider dtype hides what was lost",
        )  # fmt: skip
