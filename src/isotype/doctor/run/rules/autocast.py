"""Recognises code that runs outside of the autocast region that it needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ....finding import Finding
from ..autocast import starts_thread
from ..custom_functions import MissingCast, find_missing_cast
from ..evidence import Evidence, Operand
from ..expressions import node_keyword
from ..frames import CallFrame
from ..model_casts import find_unwrapping
from ..settings import is_prepared_model, runs_under_autocast
from .findings import make_finding
from .operands import (
    add_brackets,
    describe_operand,
    find_half_dtype,
    first_of_other_dtype,
    have_different_dtypes,
    list_floating,
)


def _describe_uncast_operands(
    evidence: Evidence, operands: Sequence[Operand], half_dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the facts of an error that autocast would have prevented: two operands of different
    dtypes, their device, and the dtype to which autocast would have cast both.
    """
    return {
        "device": evidence.device,
        "target": str(half_dtype),
        "first": describe_operand(operands[0]),
        "second": describe_operand(first_of_other_dtype(operands)),
    }


def find_autocast_of_other_device(evidence: Evidence) -> Finding | None:
    """Finds operands that autocast would cast if it were switched on for their device."""
    operands = list_floating(evidence)
    half = find_half_dtype(operands)
    state = evidence.autocast
    if not state.unused_at or state.is_on or not have_different_dtypes(operands) or half is None:
        return None
    return make_finding(
        "RN026",
        evidence,
        region_device=state.unused_device,
        region_at=state.unused_at,
        **_describe_uncast_operands(evidence, operands, half),
    )


def find_lost_autocast(evidence: Evidence) -> Finding | None:
    operands = list_floating(evidence)
    half_dtype = find_half_dtype(operands)
    if not evidence.autocast.lost_at or not have_different_dtypes(operands) or half_dtype is None:
        return None
    start = max(i for i, frame in enumerate(evidence.frames) if starts_thread(frame))
    frames = [*evidence.frames[start:], *evidence.frames]
    frame = next(frame for frame in frames if frame.is_user_code)
    return make_finding(
        "RN004",
        evidence,
        region_at=evidence.autocast.lost_at,
        function=frame.function,
        call=frame.text,
        call_at=frame.location,
        **_describe_uncast_operands(evidence, operands, half_dtype),
    )


def find_custom_backward(evidence: Evidence) -> Finding | None:
    operands = list_floating(evidence)
    frame = evidence.user_frame
    context = frame.variables.get("ctx", frame.variables.get("self"))
    # the context of a forward has the same type
    is_custom_backward = isinstance(context, torch.autograd.function.BackwardCFunction)
    if not evidence.in_backward or not is_custom_backward or not have_different_dtypes(operands):
        return None
    first = operands[0]
    second = first_of_other_dtype(operands)
    output = _find_output(evidence)
    if output is not None:  # its dtype is that of the result
        second = output
        first = first_of_other_dtype([output, *operands])
    is_decorated = output is not None or any(
        frame.function == "decorate_bwd" for frame in evidence.frames
    )
    modes = [_setting_dtype(str(setting)) for setting in evidence.settings]
    has_autocast = evidence.other_region is not None or any(mode is not None for mode in modes)
    operator = _find_custom_operator(evidence)
    missing = _find_missing_cast(evidence, context, operands)
    half = find_half_dtype(operands)
    return make_finding(
        "RN005",
        evidence,
        owner=operator or type(context).__name__.removesuffix("Backward"),
        operator=operator,
        half="" if half is None else str(half),
        first=describe_operand(first),
        second=describe_operand(second),
        device=evidence.device,
        decorated=is_decorated or _is_unknown_to_autocast(frame.expression),
        missing="" if missing is None else missing.value,
        missing_at="" if missing is None else missing.value_at,
        forward_cast="" if missing is None else missing.text,
        forward_at="" if missing is None else missing.location,
        missing_cast="" if missing is None else missing.cast,
        has_autocast=has_autocast,
        cast=add_brackets(first.label),
        target=str(second.dtype),
        at=frame.location,
    )


def _find_missing_cast(
    evidence: Evidence, context: Any, operands: Sequence[Operand]
) -> MissingCast | None:
    """Returns a cast of forward that backward does not apply to one of the operands."""
    frame = evidence.user_frame
    for operand in operands:
        other = next((part for part in operands if part.dtype != operand.dtype), operand)
        if evidence.frames[operand.frame_index] is frame:
            missing = find_missing_cast(frame, context, operand.node, other.dtype)
            if missing is not None:
                return missing
    return None


def _is_unknown_to_autocast(node: ast.AST | None) -> bool:
    """True for a product that writes into an existing tensor, which autocast does not cast."""
    match node:
        case ast.Call(ast.Attribute(_, method)):
            return method.endswith("_") or node_keyword(node, "out") is not None
    return False


def _find_output(evidence: Evidence) -> Operand | None:
    """Returns the tensor into which the failing call writes, or None. Autocast does not cast the
    operands of such a call.
    """
    call = evidence.failing_frame.expression
    output = node_keyword(call, "out") if isinstance(call, ast.Call) else None
    return next((operand for operand in evidence.operands if operand.node is output), None)


def _find_custom_operator(evidence: Evidence) -> str:
    """Returns the name of the operator whose backward `torch.library.register_autograd` registered,
    such as `my_library::my_operator`, or "".
    """
    for frame in reversed(evidence.frames):
        operator = frame.variables.get("op")
        if isinstance(operator, torch._ops.OpOverload) and frame.function == "backward":
            return f"{operator.namespace}::{operator._opname}"
    return ""


def find_call_outside_autocast(evidence: Evidence) -> Finding | None:
    operands = list_floating(evidence)
    if (
        not have_different_dtypes(operands)
        or find_half_dtype(operands) is None
        or evidence.autocast.is_on
    ):
        return None
    if evidence.autocast.location and evidence.autocast.is_on is False:
        return None  # the program switches it off for this code
    region = evidence.other_region
    if region is not None and not region.runs_model and _has_cast_input(evidence, operands):
        return None  # another model runs under autocast
    if region is not None:
        text = f"{region.location} opens autocast"
        dtype = region.dtype or find_half_dtype(operands)
        device = region.device or evidence.device
    else:
        modes = [
            setting for setting in evidence.settings if _setting_dtype(str(setting)) is not None
        ]
        if not modes or not runs_under_autocast(evidence.frames, evidence.model):
            return None
        text = f"{modes[0]} runs the training forward under autocast"
        dtype = _setting_dtype(str(modes[0]))
        device = evidence.device
    frame = find_outermost_call(evidence)
    unwrapping = None
    if is_prepared_model(evidence.frames, evidence.model):
        unwrapping = find_unwrapping(evidence.frames)
    evidence.producer_of(operands[0])  # shown with the operands
    return make_finding(
        "RN003",
        evidence,
        frame,
        call=frame.text,
        call_at=frame.location,
        region=text,
        unwrapping="" if unwrapping is None else unwrapping.text,
        unwrapping_at="" if unwrapping is None else unwrapping.location,
        device=device,
        target=str(dtype),
        first=describe_operand(operands[0]),
        second=describe_operand(first_of_other_dtype(operands)),
    )


def _has_cast_input(evidence: Evidence, operands: Sequence[Operand]) -> bool:
    """True if the program casts the input of a layer, and all weights of its model have one other
    dtype, as an fp32 VAE beside a model that runs under autocast.
    """
    inputs = [operand for operand in operands if not operand.path]
    weights = {operand.dtype for operand in operands if operand.path}
    if len(weights) != 1 or not inputs or set(evidence.dtype_counts) != weights:
        return False
    producers = [evidence.producer_of(operand) for operand in inputs]
    return any(producer.kind == "cast" and producer.is_proven for producer in producers)


def _setting_dtype(setting: str) -> torch.dtype | None:
    """Returns the autocast dtype that a setting asks for, for example bf16 for
    `SFTConfig.bf16=True` or for `Accelerator.mixed_precision=bf16`.
    """
    match = re.search(r"\.(bf16|fp16)=True|mixed_precision=(bf16|fp16)", setting)
    if match is None:
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[match[1] or match[2]]


def find_outermost_call(evidence: Evidence) -> CallFrame:
    """Returns the user's frame that calls the model. The frame is the last one before the first
    frame that belongs to a module.
    """
    caller = evidence.user_frame
    for frame in evidence.frames:
        if isinstance(frame.variables.get("self"), nn.Module):
            break
        if frame.is_user_code:
            caller = frame
    return caller
