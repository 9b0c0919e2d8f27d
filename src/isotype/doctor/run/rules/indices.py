"""Recognises indices and masks in a dtype that the operator does not accept, and arithmetic of masks."""

from __future__ import annotations

import ast
import re

import torch

from ....finding import Finding
from ..evidence import Evidence, Operand
from ..expressions import node_keyword
from ..producer import Producer
from .findings import make_operand_finding
from .operands import cast_floats_only, stands_in_user_line

_INDEX_ERROR = re.compile(
    r"argument #\d+ 'indices'|used as indices must be|index.*(?:int64|int32|long)"
    r"|(?:int64|int32|(?i:long)[\w ]*) for index|index tensor of type LongTensor"
    r"|indices should be Long|can be converted to an index"
    r'|"(?:bincount|repeat_interleave)\w*" not implemented for'
)
_MASK_ERROR = re.compile(
    r"only supports boolean masks|expected BoolTensor for mask"
    r"|expected condition to be a boolean tensor|mask(?:ed_select)?: expected \w* ?bool"
)
_BOOL_ARITHMETIC = re.compile(r"(?:two bool tensors|a bool tensor) is not supported")
_INDEX_ARGUMENTS = ("index", "indices", "repeats")


def find_wrong_indices(evidence: Evidence) -> Finding | None:
    """Finds indices that are floats, or integers of fewer bits than an index needs."""
    if _INDEX_ERROR.search(evidence.message) is None or not evidence.operands:
        return None
    wrong = [
        operand
        for operand in evidence.operands
        if not operand.path and operand.dtype not in (torch.int64, torch.bool)
    ]
    operand = _find_index(evidence, wrong)
    if operand is None:
        return None
    is_narrow = not operand.dtype.is_floating_point
    producer = evidence.producer_of(operand)
    return make_operand_finding(
        "RN015",
        evidence,
        operand,
        is_narrow=is_narrow,
        origin=_describe_origin(operand, producer) if is_narrow else "",
        operation=evidence.operation,
        is_in_user_line=stands_in_user_line(evidence, operand, producer),
        is_cast=producer.kind == "cast" and producer.is_proven,
        # other lines, such as a loss, may use these indices too
        is_array=producer.is_proven and producer.text.startswith("torch.from_numpy("),
        source=producer.text,
        source_at=producer.location,
        float_cast=cast_floats_only(producer.text),
    )


def _find_index(evidence: Evidence, wrong: list[Operand]) -> Operand | None:
    """Returns the operand that is the index: that of the keyword, or the first tensor after the one
    that is indexed.
    """
    call = evidence.failing_frame.expression
    if isinstance(call, ast.Call):
        keywords = [node_keyword(call, name) for name in _INDEX_ARGUMENTS]
        named = [o for o in wrong if any(o.node is node for node in keywords)]
        if named:
            return named[0]
    receiver = (
        call.func.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        else None
    )
    # the table or the tensor that is indexed: the owner of the method, or the first operand
    indexed = next((o for o in evidence.operands if o.node is receiver), evidence.operands[0])
    later = [operand for operand in wrong if operand is not indexed]
    if len(evidence.operands) > 1:
        return later[0] if later else None
    return wrong[0] if wrong else None


def find_wrong_mask(evidence: Evidence) -> Finding | None:
    """Finds a mask that is not bool."""
    if _MASK_ERROR.search(evidence.message) is None:
        return None
    is_condition = "condition" in evidence.message  # the first argument of torch.where
    candidates = evidence.operands if is_condition else evidence.operands[1:]
    wrong = [operand for operand in candidates if operand.dtype != torch.bool]
    if not wrong:
        return None
    producer = evidence.producer_of(wrong[0])
    return make_operand_finding(
        "RN029",
        evidence,
        wrong[0],
        operation=evidence.operation,
        origin=_describe_origin(wrong[0], producer),
        is_cast=producer.kind == "cast" and producer.is_proven,
        is_in_user_line=stands_in_user_line(evidence, wrong[0], producer),
        source_at=producer.location,
    )


def find_mask_arithmetic(evidence: Evidence) -> Finding | None:
    """Finds a subtraction or negation of bool."""
    masks = [operand for operand in evidence.operands if operand.dtype == torch.bool]
    if _BOOL_ARITHMETIC.search(evidence.message) is None or not masks:
        return None
    return make_operand_finding(
        "RN029",
        evidence,
        masks[0],
        operation=evidence.operation,
        is_arithmetic=True,
        origin=_describe_origin(masks[0], evidence.producer_of(masks[0])),
    )


def _describe_origin(operand: Operand, producer: Producer) -> str:
    """Returns what gave an operand its dtype, or "" if the operand itself is all that is known."""
    return producer.describe(operand.dtype_name) if producer.text != operand.label else ""
