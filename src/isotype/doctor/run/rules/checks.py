"""Recognises checks of the program about the dtypes of tensors."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from ....dtypes import format_dtype, to_torch
from ....finding import Finding
from ..arguments import find_passed_argument
from ..checks import (
    find_compared_dtypes,
    find_dtype_owner,
    find_refused_tensors,
    read_allowed_dtypes,
)
from ..evidence import Evidence
from ..expressions import read_value
from ..recorded_origins import find_tensor_origin
from .findings import make_finding
from .operands import (
    add_brackets,
    describe_others,
    find_model_variable,
    find_tensor_producer,
    list_floating,
)


def find_failed_check(evidence: Evidence) -> Finding | None:
    """Finds a check of the program about the dtypes of tensors: `assert x.dtype == y.dtype`, `if
    x.dtype != y.dtype: raise`, `assert x.dtype in (...)`, or a raised message such as "x must be of
    type float32".
    """
    frame = evidence.failing_frame
    compare = find_compared_dtypes(frame)
    if compare is None:
        return _find_stated_check(evidence)
    allowed = read_allowed_dtypes(compare, frame)
    if allowed is not None:
        return _explain_refused_dtype(compare, allowed, evidence)
    sides = [compare.left, *compare.comparators]
    dtypes = [read_value(side, frame) for side in sides]
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        return _find_stated_check(evidence)
    owners = [find_dtype_owner(side, evidence.frames) for side in sides]
    side_index = _find_side_beside_weight(owners, evidence)
    if side_index is None and isinstance(frame.statement, ast.Raise) and None not in owners:
        return None  # two tensors that differ: the rule for operands of an operator decides
    if side_index is None:
        side_index = _find_odd_side(dtypes, owners, evidence)
    owner = None if side_index is None else owners[side_index]
    if side_index is None or owner is None:
        return None
    dtype = dtypes[side_index]
    needed = next(other for other in dtypes if other != dtype)
    others = [ast.unparse(other[0]) for other in owners if other not in (None, owner)]
    return _make_check_finding(evidence, owner[0], dtype, [needed], others, frame_index=owner[1])


def _explain_refused_dtype(
    compare: ast.Compare, allowed: Sequence[torch.dtype], evidence: Evidence
) -> Finding | None:
    """Explains a check that refuses the dtype of a tensor. The fix casts to the dtype that autocast,
    the model or the other tensors of the function have, if the check allows it.
    """
    frame = evidence.failing_frame
    dtype = read_value(compare.left, frame)
    refused = find_refused_tensors(compare, allowed, frame)
    if not refused or not isinstance(dtype, torch.dtype) or dtype in allowed:
        return None
    values = [value for value in frame.variables.values() if isinstance(value, torch.Tensor)]
    usual = [other for other, _ in Counter(value.dtype for value in values).most_common()]
    if evidence.majority_dtype is not None:
        usual.insert(0, evidence.majority_dtype)
    if evidence.autocast.is_on and evidence.autocast.dtype is not None:
        usual.insert(0, evidence.autocast.dtype)
    preferred = next((other for other in usual if other in allowed), None)
    needed = [other for other in allowed if other != preferred]
    if preferred is not None:
        needed.insert(0, preferred)
    is_open = preferred is None and len(allowed) > 1
    return _make_check_finding(
        evidence, refused[0], dtype, needed, [], refused[1:], is_open=is_open
    )


# messages of a check that name a value and the dtype that it needs
_STATED_DTYPE = re.compile(
    r"`?(?P<name>[A-Za-z_][\w.]*)`? (?:tensor )?(?:must|should|has to|needs to) be (?:a |an )?"
    r"(?:of )?(?:type |dtype )?(?:torch\.)?(?P<dtype>float32|float16|bfloat16|float64|[bf]p?16|fp32)\b"
)


def _find_stated_check(evidence: Evidence) -> Finding | None:
    """Finds a raised message that names a tensor of the failing function and the dtype it needs."""
    match = _STATED_DTYPE.search(evidence.message)
    if match is None or not isinstance(evidence.failing_frame.statement, ast.Raise):
        return None
    needed = to_torch(format_dtype(match["dtype"]))
    for operand in list_floating(evidence):
        if operand.label == match["name"] and operand.dtype != needed:
            assert isinstance(operand.node, ast.expr)
            return _make_check_finding(evidence, operand.node, operand.dtype, [needed], [])
    return None


def _make_check_finding(
    evidence: Evidence,
    owner: ast.expr,
    dtype: torch.dtype,
    needed: Sequence[torch.dtype],
    others: Sequence[str],
    also_refused: Sequence[ast.expr] = (),
    frame_index: int = -1,
    *,
    is_open: bool = False,
) -> Finding:
    """Returns the finding about a tensor in a check of the program.

    owner   the expression of the tensor
    needed  the dtypes that the check allows; the fix casts to the first
    others  the tensors with which the check compares it
    also_refused  other parameters of the function that the check would refuse
    frame_index   the frame of the expression of the tensor
    is_open       whether nothing in the program decides which of the allowed dtypes to take
    """
    frame_index %= len(evidence.frames)
    operands = {operand.label: operand for operand in evidence.operands}
    operand = operands.get(ast.unparse(owner))
    producer = find_tensor_producer(evidence, owner, frame_index, dtype)
    weight = None if operand is None else operand.weight
    origin = None if weight is None else find_tensor_origin(weight)
    variable = ""
    if operand is not None and isinstance(weight, nn.Parameter):
        variable = find_model_variable(evidence, [weight])
    compared = [operands[other] for other in others if other in operands]
    passed, passed_at = _find_passed_argument(owner, frame_index, evidence)
    is_autocast = producer.kind in ("module", "autocast") and evidence.autocast.is_on
    target = str(needed[0])
    arguments = [_find_passed_argument(part, frame_index, evidence) for part in also_refused]
    is_followed = frame_index < len(evidence.frames) - 1 and isinstance(owner, ast.Name)
    # casts on other lines would be another change
    casts = [f"`{text}.to({target})`" for text, place in arguments if place == passed_at]
    return make_finding(
        "RN020",
        evidence,
        value=ast.unparse(owner),
        others=" and ".join(others),
        others_origin=describe_others(evidence, compared),
        has=format_dtype(dtype),
        needs=" or ".join(map(format_dtype, needed)),
        choices=" or ".join(map(str, needed[1:])) if is_open else "",
        source=producer.text,
        source_at=producer.location,
        autocast=is_autocast and dtype == evidence.autocast.dtype,
        target=target,
        at=producer.location,
        source_reason="" if is_autocast else producer.reason,
        other_casts="".join(f" and {cast}" for cast in dict.fromkeys(casts)),
        is_cast=producer.kind == "cast" and producer.is_proven,
        weight=operand.path if operand is not None and origin is not None else "",
        variable=ast.unparse(owner) if is_followed else "",
        used_at=evidence.frames[frame_index].location,
        origin="" if origin is None else origin.describe("it", format_dtype(dtype)),
        model_cast=f"{variable}.to({target})" if variable else "",
        passed=passed,
        passed_at=passed_at,
    )


def _find_side_beside_weight(
    owners: Sequence[tuple[ast.expr, int] | None], evidence: Evidence
) -> int | None:
    """Returns the index of the side of a comparison in a library that is computed, if the other side
    is a weight, as in the check of `torch.nn.utils.parametrize`.
    """
    sides = [
        None if owner is None else read_value(owner[0], evidence.frames[owner[1]])
        for owner in owners
    ]
    computed = [i for i, side in enumerate(sides) if not isinstance(side, nn.Parameter)]
    is_beside_weight = len(sides) == 2 and len(computed) == 1 and None not in owners
    if evidence.failing_frame.is_user_code or not is_beside_weight:
        return None
    return computed[0]


def _find_odd_side(
    dtypes: Sequence[torch.dtype],
    owners: Sequence[tuple[ast.expr, int] | None],
    evidence: Evidence,
) -> int | None:
    """Returns the index of the side of a failed comparison whose tensor has the wrong dtype: another
    one than a dtype that the code names, than most sides, or than most weights of the model.
    """
    counts = Counter(dtypes)
    indices = [i for i, owner in enumerate(owners) if owner is not None]
    if len(counts) < 2 or not indices:
        return None
    named = {dtype for dtype, owner in zip(dtypes, owners) if owner is None}
    usual = evidence.autocast.dtype if evidence.autocast.is_on else evidence.majority_dtype
    for is_odd in (
        lambda i: bool(named) and dtypes[i] not in named,
        lambda i: counts[dtypes[i]] < max(counts.values()),
        lambda i: dtypes[i] != usual,
    ):
        odd = [i for i in indices if is_odd(i)]
        if odd:
            return odd[0]
    return indices[0]


def _find_passed_argument(node: ast.expr, index: int, evidence: Evidence) -> tuple[str, str]:
    """Returns the expression that a caller in the user's code passes for a parameter of a running
    function, and its place. Callers that only pass their own parameter on are skipped. Returns ""
    for other expressions, and for a parameter to which the function assigns another value.
    """
    passed = ("", "")
    while index > 0 and isinstance(node, ast.Name):
        frame, caller = evidence.frames[index], evidence.frames[index - 1]
        argument = find_passed_argument(frame, caller, node.id)
        if argument is None or not caller.is_user_code:
            break
        passed = (add_brackets(ast.unparse(argument)), caller.location_of(argument))
        node, index = argument, index - 1
    return passed
