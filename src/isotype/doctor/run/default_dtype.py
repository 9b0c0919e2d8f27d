"""Names the call that set the default dtype in the cause of a finding, if a tensor in the failing
expression has this dtype because its line gives none.
"""

from __future__ import annotations

import ast
import dataclasses

import torch

from ...dtypes import format_dtype
from ...finding import Finding
from .evidence import Evidence, Operand
from .model_casts import (
    creates_in_default_dtype,
    find_recorded_default_dtype_setter,
    reads_default_dtype,
)
from .producer import Producer
from .weight_record import RECORD, DefaultDtypeEvent

_GETTER = "torch.get_default_dtype()"


def add_default_dtype_origin(finding: Finding, evidence: Evidence) -> Finding:
    """Adds to the cause of a finding which call set the default dtype that an operand has. If
    another operand has a dtype that the program had set before as the default, the fix sets
    this one again: a cast of the operand leaves the program's other tensors in the wrong dtype.
    """
    if len(evidence.floating_dtypes) < 2:
        return finding
    for operand in evidence.operands:
        producer = evidence.producers.get(id(operand))
        if producer is None or operand.path or not _has_default_dtype(operand, producer):
            continue
        setter = find_recorded_default_dtype_setter(evidence.frames, operand.dtype)
        if setter is None or setter.location in (finding.cause or ""):
            continue
        caller = f" in the call `{setter.function}" if setter.function else ""
        cause = (
            f"{finding.cause}; {operand.dtype_name} is the default dtype, which `{setter.text}`"
            f" ({setter.location}) set{caller}"
        )
        fix = _set_default_again(evidence, operand, producer) or finding.fix
        return dataclasses.replace(finding, cause=cause, fix=fix)
    return finding


def _has_default_dtype(operand: Operand, producer: Producer) -> bool:
    """True if the line that made an operand takes the default dtype, and this has not changed."""
    if operand.dtype != torch.get_default_dtype() or producer.kind not in ("cast", "creation"):
        return False
    try:
        call = ast.parse(producer.text, mode="eval").body
    except SyntaxError:
        return False
    if any(reads_default_dtype(node) for node in ast.walk(call)):
        return True
    return isinstance(call, ast.Call) and not producer.reason and creates_in_default_dtype(call)


def _find_line_after(evidence: Evidence, setter: DefaultDtypeEvent) -> str:
    """Returns the running line of the innermost function in which the default dtype was set."""
    codes = {call.code for call in setter.calls}
    frames = [frame for frame in evidence.frames if frame.is_user_code]
    common = [frame for frame in frames if frame.code in codes]
    return (common or frames)[-1 if common else 0].location


def _set_default_again(evidence: Evidence, operand: Operand, producer: Producer) -> str:
    """Returns a fix for a program that sets two default dtypes, one after the other, or ""."""
    others = evidence.floating_dtypes - {operand.dtype}
    events = RECORD.default_dtype_events
    earlier = {event.dtype for event in events} & others
    if len(earlier) != 1:
        return ""
    dtype = earlier.pop()
    if _GETTER in producer.text:
        code = producer.text.replace(_GETTER, str(dtype))
    elif "dtype" not in producer.text:
        code = f"{producer.text[:-1]}, dtype={dtype})"
    else:
        return ""
    dtype_name = format_dtype(dtype)
    return (
        f"`torch.set_default_dtype({dtype})` before {_find_line_after(evidence, events[-1])} for what"
        f" was built in {dtype_name}; or, if all callers need {dtype_name}, `{code}` at"
        f" {producer.location}, and the same for the other tensors in the default dtype"
    )
