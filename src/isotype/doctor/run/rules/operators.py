"""Recognises operands of different dtypes of any other operator."""

from __future__ import annotations

import ast
import dataclasses
import linecache
from collections.abc import Sequence
from typing import Any

from ....finding import Finding, Place
from ....observe.origin import short_path
from ..checks import find_check_location
from ..evidence import Evidence, Operand
from ..program_source import ProgramSource
from .findings import MAX_GROUPS, make_finding
from .operands import (
    FLOAT_ONLY_FUNCTIONS,
    HALF_DTYPES,
    describe_others,
    describe_setting,
    find_odd_operand,
    first_of_other_dtype,
    have_different_dtypes,
    list_computed,
    list_floating,
    passed_expression,
    passed_location,
    stands_in_user_line,
)


def find_compiled_operands(evidence: Evidence) -> Finding | None:
    """Finds operands of different dtypes in code that `torch.compile` traces. The frames are those
    of the compiler: only its message contains the user's line. In code that the compiler generated,
    the operands differ also if they do not without the compiler.
    """
    operands = list_floating(evidence)
    if not have_different_dtypes(operands):
        return None
    second = first_of_other_dtype(operands)
    if evidence.compiled_location is None:
        if not evidence.runs_eagerly:
            return None
        paths = [operand.path for operand in operands if operand.path]
        return make_finding(
            "RN021",
            evidence,
            line=evidence.user_frame.text,
            at=evidence.user_frame.location,
            first=operands[0].dtype_name,
            second=second.dtype_name,
            target=str(second.dtype),
            weight=paths[0] if paths else "",
            runs_eagerly=True,
            **_change_backend(evidence),
        )
    file, line = evidence.compiled_location
    finding = make_finding(
        "RN021",
        evidence,
        line=linecache.getline(file, line).strip(),
        at=f"{short_path(file)}:{line}",
        first=operands[0].dtype_name,
        second=second.dtype_name,
        target=str(second.dtype),
    )
    return dataclasses.replace(finding, place=Place(file=short_path(file), line=line))


def _change_backend(evidence: Evidence) -> dict[str, Any]:
    """Returns the only call of `torch.compile` in the program with a backend that does not change the
    program's operators, and its place, unless it has this backend already.
    """
    calls = [
        (source, call)
        for source, call in ProgramSource(evidence.frames).list_calls("compile")
        if ast.unparse(call.func) == "torch.compile"
    ]
    if len(calls) != 1 or "aot_eager" in ast.unparse(calls[0][1]):
        return {}
    source, call = calls[0]
    keywords = [keyword for keyword in call.keywords if keyword.arg != "backend"]
    keywords.append(ast.keyword("backend", ast.Constant("aot_eager")))
    code = ast.unparse(ast.Call(call.func, call.args, keywords)).replace("'", '"')
    return {"compiled": code, "compiled_at": source.location_of(call)}


def _has_no_half_kernel(evidence: Evidence) -> bool:
    """True if the failing call is one of a function that PyTorch has for fp32 and fp64 only."""
    call = evidence.failing_frame.expression
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(FLOAT_ONLY_FUNCTIONS)


def find_mixed_operands(evidence: Evidence) -> Finding | None:
    operands = list_computed(evidence)
    if not have_different_dtypes(operands):
        return None
    odd = find_odd_operand(evidence, operands)
    others = [operand for operand in operands if operand.dtype != odd.dtype]
    halves = [operand for operand in operands if operand.dtype in HALF_DTYPES]
    if _has_no_half_kernel(evidence) and others[0] in halves:
        odd, others = others[0], [operand for operand in operands if operand not in halves]
    producer = evidence.producer_of(odd)
    names = [operand.path or operand.label for operand in others]
    if len(names) > MAX_GROUPS:
        names = [*names[:2], f"{len(names) - 2} others"]
    return make_finding(
        "RN017",
        evidence,
        operation=evidence.operation,
        odd=odd.path or odd.label,
        odd_dtype=odd.dtype_name,
        others=" and ".join(names),
        others_dtype=others[0].dtype_name,
        others_origin=describe_others(evidence, others),
        source=producer.text,
        source_at=producer.location,
        reason=producer.reason,
        casts=_cast_operands(evidence, [o for o in operands if o.dtype == odd.dtype], others[0]),
        check_at=_check_location(evidence, odd),
        at=passed_location(evidence, producer),
        target=str(others[0].dtype),
        autocast=bool(evidence.autocast.is_on),
        set_by=describe_setting(evidence, producer, odd.dtype, others[0].dtype),
    )


def _cast_operands(evidence: Evidence, operands: Sequence[Operand], other: Operand) -> str:
    """Returns code that casts the operands of one dtype to that of the other, or "" if the first of
    them does not stand in the user's line.
    """
    casts = []
    for operand in operands:
        producer = evidence.producer_of(operand)
        if not operand.path and stands_in_user_line(evidence, operand, producer):
            casts.append(f"`{passed_expression(evidence, operand, producer)}.to({other.dtype})`")
    return " and ".join(dict.fromkeys(casts))


def _check_location(evidence: Evidence, operand: Operand) -> str:
    """Returns the place of the check of the user's code that failed for a variable, or "". A cast
    before this line changes the variable.
    """
    frame = evidence.failing_frame
    is_check = isinstance(frame.statement, (ast.Raise, ast.Assert)) and frame.is_user_code
    is_variable = operand.label.isidentifier() and evidence.frames[operand.frame_index] is frame
    return find_check_location(frame) if is_check and is_variable else ""
