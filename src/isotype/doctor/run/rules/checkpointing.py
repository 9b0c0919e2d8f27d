"""Recognises dtypes that differ between forward and the recomputation of a checkpointed function."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from ....dtypes import format_dtype, to_torch
from ....finding import Finding
from ..evidence import MISSES_CAST, Evidence
from ..expressions import CASTING_METHODS
from ..model_casts import find_default_dtype_creation, find_model_cast
from ..program_source import ProgramSource
from ..recomputation import (
    Recomputation,
    find_changed_states,
    find_inner_autocast,
    find_recomputation,
    read_autocast_with_cache,
)
from .findings import make_finding
from .operands import first_of_other_dtype, have_different_dtypes, list_floating


def find_changed_checkpoint(evidence: Evidence) -> Finding | None:
    """Finds a second run of a checkpointed function whose dtypes are not those of the first."""
    if type(evidence.error).__name__ != "CheckpointError":
        return None
    recomputation = find_recomputation(evidence.frames)
    if recomputation is None:
        return None
    saved = re.search(r"saved metadata: .*'dtype': (torch\.\w+)", evidence.message)
    recomputed = re.search(r"recomputed metadata: .*'dtype': (torch\.\w+)", evidence.message)
    if saved is None or recomputed is None:
        if "different number of tensors" not in evidence.message:
            return None
        facts = _describe_changes(evidence, recomputation, None)
        if not facts["decided"]:
            return None  # the dtypes may be those of forward
        return make_finding("RN019", evidence, saved="", recomputed="", layer="", **facts)
    if saved[1] == recomputed[1]:
        return None
    return make_finding(
        "RN019",
        evidence,
        saved=format_dtype(saved[1]),
        recomputed=format_dtype(recomputed[1]),
        **_describe_changes(evidence, recomputation, to_torch(format_dtype(recomputed[1]))),
    )


def find_failed_recomputation(evidence: Evidence) -> Finding | None:
    """Finds an operator that fails when a checkpointed function runs again in backward. The same
    operator did not fail in forward.
    """
    operands = list_floating(evidence)
    recomputation = find_recomputation(evidence.frames)
    if recomputation is None or not have_different_dtypes(operands) or not evidence.in_backward:
        return None
    weights = [operand for operand in operands if operand.path]
    others = [operand for operand in operands if not operand.path]
    if not weights or not others:
        weights = [first_of_other_dtype(operands)]
        others = [operands[0]]
    evidence.producer_of(others[0])  # shown with the operands
    is_weight_changed = any(
        tensor.is_floating_point() and tensor.dtype != weights[0].dtype
        for tensor in recomputation.inputs
    )
    cast_dtype = weights[0].dtype if is_weight_changed else None
    facts = _describe_changes(evidence, recomputation, cast_dtype)
    if not facts["changes"]:
        return None
    return make_finding(
        "RN019",
        evidence,
        saved=others[0].dtype_name,
        recomputed=weights[0].dtype_name,
        layer=weights[0].path or weights[0].label,
        **facts,
    )


def find_uncached_cast(evidence: Evidence) -> Finding | None:
    """Finds a selective checkpoint in whose first run autocast did not cast a weight, because its
    cache had the copy that an earlier use of the weight made. The second run has an empty cache.
    """
    recomputation = find_recomputation(evidence.frames)
    if recomputation is None or MISSES_CAST.search(evidence.message) is None:
        return None
    dtype = read_autocast_with_cache(evidence.frames)
    if dtype is None or _is_cast(evidence.user_frame.expression):
        return None
    region = evidence.other_region
    path = next((operand.path for operand in evidence.operands if operand.path), "")
    return make_finding(
        "RN019",
        evidence,
        saved="",
        layer=path,
        recomputed=format_dtype(dtype),
        decided="copies",
        region_at="" if region is None or not region.is_on else region.location,
        uncached=_switch_cache_off(evidence, "" if region is None else region.location),
        function=recomputation.describe(evidence.names),
    )


def _switch_cache_off(evidence: Evidence, location: str) -> str:
    """Returns the source code of the call of autocast at a line, with its cache off, or ""."""
    for source, call in ProgramSource(evidence.frames).list_calls("autocast"):
        if source.location_of(call) == location:
            keywords = [keyword for keyword in call.keywords if keyword.arg != "cache_enabled"]
            keywords.append(ast.keyword("cache_enabled", ast.Constant(False)))
            return ast.unparse(ast.Call(call.func, call.args, keywords))
    return ""


def _is_cast(node: ast.AST | None) -> bool:
    """True for a cast that the program itself does, such as `x.to(dtype)`."""
    match node:
        case ast.Call(ast.Attribute(_, name)):
            return name in CASTING_METHODS
    return False


def _describe_changes(
    evidence: Evidence, recomputation: Recomputation, cast_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Returns what may have changed the dtypes of a checkpointed function between forward and
    backward. `decided` names the kind of the only change that was found, or is "".

    cast_dtype  the dtype to which the weights may have been cast
    """
    frames = evidence.frames
    creation = find_default_dtype_creation(frames, recomputation.content)
    states = find_changed_states(recomputation, frames)
    region = find_inner_autocast(recomputation)
    cast = None
    if cast_dtype is not None and recomputation.module is not None:
        weights = (p for p in recomputation.module.parameters() if p.dtype == cast_dtype)
        weight = next(weights, None)
        cast = None if weight is None else find_model_cast(frames, weight)
    if cast is not None and not cast.function:
        cast = None  # the main code casts the model before forward
    changes = {}
    if creation is not None:
        changes["creation"] = f"`{creation.text}` ({creation.location})"
    if cast is not None:
        changes["cast"] = f"`{cast.text}` in {cast.function} ({cast.location})"
    for state in states:
        kind = "cache" if state.is_inside else "state"
        changes[kind] = f"`{state.text}` ({state.location})"
    if region is not None and not states:
        changes["region"] = f"`{region[0]}` ({region[1]})"
    is_decided = len(changes) == 1 and len(states) < 2
    return {
        "decided": next(iter(changes)) if is_decided else "",
        "change": next(iter(changes.values())) if is_decided else "",
        "changes": "; ".join(changes.values()),
        "setter": "" if creation is None else creation.function,
        "function": recomputation.describe(evidence.names),
        "device": evidence.device,
        "target": "" if cast_dtype is None else str(cast_dtype),
        "read": states[0].name if states else "",
        "context": states[0].context if states else "",
    }
