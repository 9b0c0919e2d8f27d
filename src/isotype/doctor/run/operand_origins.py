"""Finds the calls of the user's code that gave the weights in a failing expression their dtypes, and
names them in a finding.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from ...finding import Finding
from .evidence import Evidence, Operand
from .modules import floating_weight_dtypes
from .producer import Producer
from .recorded_origins import (
    find_recorded_origin,
    find_tensor_origin,
    is_added_to_built_model,
)
from .weight_origin import WeightOrigin
from .weight_record import RECORD

# the causes in which two values differ in dtype; their sentence says what made each of them
_SINGLE_CODE = "RN014"  # a cause of one operand
_CODES = (
    _SINGLE_CODE,
    "RN001",
    "RN008",
    "RN011",
    "RN016",
    "RN017",
    "RN020",
    "RN022",
    "RN023",
    "RN041",
)
# the causes that also name weights which no call cast: they describe both operands alike
_SYMMETRIC_CODES = ("RN011", "RN017", "RN020")


def find_operand_origin(evidence: Evidence, operand: Operand) -> WeightOrigin | None:
    """Returns the call that gave a parameter or buffer its dtype. Returns None for other operands,
    and for weights that were built in the default dtype together with their model, and never cast.
    """
    if operand.weight is None:
        return None
    origin = find_tensor_origin(operand.weight)
    if origin is None or origin.kind != "default":
        return origin
    return origin if is_added_to_built_model(evidence.model, operand.weight) else None


def add_value_origins(finding: Finding, evidence: Evidence) -> Finding:
    """Adds to the cause of a finding which recorded calls gave the values of the failing expression
    their dtypes, if these differ, and the cause does not name these calls.
    """
    if RECORD.tensors is None or len(evidence.floating_dtypes) < 2:
        return finding
    cause = finding.cause or ""
    for operand in evidence.operands:
        producer = evidence.producers.get(id(operand))
        if producer is None or operand.path:
            continue
        if producer.location in cause:
            if (
                producer.kind in ("cast", "creation")
                and producer.reason
                and producer.reason not in cause
            ):
                cause += f"; {operand.label} is {operand.dtype_name}, because {producer.reason}"
            continue
        origin = producer.describe(operand.dtype_name)
        if origin:
            cause += f"; {operand.label}: {origin}"
    return dataclasses.replace(finding, cause=cause)


def add_weight_origins(finding: Finding, evidence: Evidence) -> Finding:
    """Adds to the cause of a finding which calls gave the weights their dtypes, if two operands
    differ in dtype or one has no kernel, and the cause does not name these calls.
    """
    is_about_two = finding.code in _CODES and len(evidence.floating_dtypes) > 1
    if not is_about_two and finding.code != _SINGLE_CODE:
        return finding
    cause = finding.cause or ""
    includes_default = finding.code in _SYMMETRIC_CODES
    for weights, origin, dtype_name in _iterate_origins(evidence, includes_default):
        if origin.location not in cause:
            cause += f"; {origin.describe(weights, dtype_name)}"
    return dataclasses.replace(finding, cause=cause)


def _iterate_origins(
    evidence: Evidence, includes_default: bool
) -> Iterator[tuple[str, WeightOrigin, str]]:
    """Yields the weights of the failing expression, or those of a module that computed an operand,
    with the call that gave them their dtype, and its name.

    includes_default  whether to yield weights that were built in the default dtype and never cast
    """
    for operand in evidence.operands:
        if not operand.dtype.is_floating_point:
            continue
        origin = find_operand_origin(evidence, operand)
        if origin is None and includes_default and operand.weight is not None:
            origin = find_tensor_origin(operand.weight)
        if origin is not None:
            yield operand.path, origin, operand.dtype_name
            continue
        producer = evidence.producers.get(id(operand))
        if producer is None or producer.hook:
            continue
        module = producer.module
        if module is None or floating_weight_dtypes(module) != {operand.dtype}:
            continue
        origin = find_recorded_origin(module.modules(), operand.dtype)
        is_outside = evidence.names.find_root(module) is not evidence.model
        # such as an adapter beside an fp16 model that no call cast
        is_uncast = is_outside and operand.dtype != evidence.majority_dtype
        is_named = includes_default or is_uncast
        if origin is not None and (origin.kind != "default" or is_named):
            name = _called_module(producer) if is_outside else producer.path
            yield f"the weights of {name}", origin, operand.dtype_name


def _called_module(producer: Producer) -> str:
    """Returns the source code of the module that an expression calls."""
    node = ast.parse(producer.text, mode="eval").body
    return ast.unparse(node.func) if isinstance(node, ast.Call) else producer.path
