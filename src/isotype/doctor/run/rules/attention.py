"""Recognises query, key, value and mask of attention in different dtypes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import torch

from ....finding import Finding
from ..evidence import Evidence, Operand
from ..producer import Producer
from .findings import make_finding, make_operand_finding
from .operands import (
    add_brackets,
    describe_others,
    describe_setting,
    find_odd_operand,
    have_different_dtypes,
    is_in_user_file,
    list_floating,
    list_source_casts,
    rebuild_creation,
)


def find_attention_operand(evidence: Evidence) -> Finding | None:
    operands = list_floating(evidence)
    if "attention" not in evidence.operation or not have_different_dtypes(operands):
        return None
    odd = find_odd_operand(evidence, operands)
    if evidence.majority_dtype is None:  # a table promotes query and key; nothing narrows one
        odd = max(operands, key=lambda operand: operand.dtype.itemsize)
    others = [operand for operand in operands if operand.dtype != odd.dtype]
    odd_labels = list(dict.fromkeys(o.label for o in operands if o.dtype == odd.dtype))
    producer = evidence.producer_of(odd)
    return make_finding(
        "RN011",
        evidence,
        odd=" and ".join(odd_labels),
        odd_dtype=odd.dtype_name,
        others=" and ".join(operand.label for operand in others),
        others_dtype=others[0].dtype_name,
        others_origin=describe_others(evidence, others),
        source=producer.text,
        source_at=producer.location,
        reason=producer.reason,
        at=evidence.user_frame.location,
        target=str(others[0].dtype),
        casts=" and ".join(
            f"`{add_brackets(label)}.to({others[0].dtype})`" for label in odd_labels
        ),
        is_in_user_line=evidence.frames[odd.frame_index] is evidence.user_frame,
        is_cast=producer.kind == "cast" and producer.is_proven,
        creation=_create_before_check(evidence, producer, others[0].dtype),
        source_casts=list_source_casts(producer, others[0].dtype),
        stored=" and ".join(_cast_stored(evidence, operands, odd, others[0].dtype)),
        set_by=describe_setting(evidence, producer, odd.dtype, others[0].dtype),
    )


def _create_before_check(evidence: Evidence, producer: Producer, dtype: torch.dtype) -> str:
    """Returns the code that created an operand, with another dtype, if a check of the program raised
    the error: a cast at the line of the check would come too late. Otherwise returns "".
    """
    is_check = isinstance(evidence.user_frame.statement, ast.Raise)
    if not is_check or not producer.is_proven or not is_in_user_file(producer.location):
        return ""
    return rebuild_creation(producer, str(dtype).removeprefix("torch."))


def _cast_stored(
    evidence: Evidence, operands: Sequence[Operand], odd: Operand, target: torch.dtype
) -> list[str]:
    """Returns code that casts the operands of one dtype where the user's code stores them in an
    object of a library, such as a cache. Returns an empty list if it does not store the first one.
    """
    producers = [evidence.producer_of(o) for o in operands if o.dtype == odd.dtype]
    if not evidence.producer_of(odd).stored:
        return []
    codes = [
        f"`{add_brackets(p.stored)}.to({target})` at {p.stored_at}" for p in producers if p.stored
    ]
    return list(dict.fromkeys(codes))


def find_attention_mask(evidence: Evidence) -> Finding | None:
    """Finds a mask whose dtype `scaled_dot_product_attention` rejects."""
    match = re.search(r"attn_mask\.dtype: (\w+(?: \w+)?) and", evidence.message)
    if match is None or not evidence.operands:
        return None
    query, *others = evidence.operands
    masks = [operand for operand in others if operand.dtype != query.dtype]
    masks = [operand for operand in masks if operand.dtype != torch.bool]
    if not masks:
        return None
    mask = masks[-1]
    return make_operand_finding(
        "RN024",
        evidence,
        mask,
        is_integer=not mask.dtype.is_floating_point,
        query_dtype=query.dtype_name,
        target=str(query.dtype),
    )
