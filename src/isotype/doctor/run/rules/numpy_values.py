"""Recognises dtypes that NumPy does not have."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from ....dtypes import format_dtype, to_torch
from ....finding import Finding
from ..evidence import NUMPY_DTYPE, Evidence
from ..expressions import is_tensor, read_value
from ..frames import CallFrame, source_text
from ..producers import find_producer
from .findings import make_finding, make_operand_finding
from .operands import add_brackets

_NUMPY_FLOATS = ("float16", "float32", "float64")


def find_numpy_dtype(evidence: Evidence) -> Finding | None:
    """Finds a dtype of torch, or the name of one, that was passed to NumPy."""
    match = NUMPY_DTYPE.search(evidence.message)
    if match is None:
        return None
    name = match["name"]
    files = [frame.file.replace("\\", "/") for frame in evidence.frames]
    call = evidence.user_frame.expression
    text = evidence.user_frame.text if call is None else source_text(call)
    reads_file = any("/safetensors/" in file for file in files) or ".get_tensor(" in text
    return make_finding(
        "RN013",
        evidence,
        value=text,
        has=format_dtype(name),
        at=evidence.user_frame.location,
        use="file" if reads_file else "dtype",
        numpy_dtype=name if name in _NUMPY_FLOATS else "float32",
        exists=name in _NUMPY_FLOATS,
    )


def find_numpy_conversion(evidence: Evidence) -> Finding | None:
    match = re.search(r"unsupported ScalarType (\w+)", evidence.message)
    if match is None:
        return None
    facts: dict[str, Any] = {
        "has": format_dtype(match[1]),
        "later": " and ".join(_find_later_conversions(evidence.user_frame)),
    }
    match evidence.user_frame.expression:
        case ast.Call(ast.Attribute(owner, "numpy")):
            facts["value"] = add_brackets(ast.unparse(owner))
            facts["at"] = evidence.user_frame.location
    if evidence.operands:
        producer = evidence.producer_of(evidence.operands[0])
        facts["origin"] = producer.describe(evidence.operands[0].dtype_name)
        return make_operand_finding("RN013", evidence, evidence.operands[0], **facts)
    if "value" in facts:  # the value of a call, which no variable holds
        node = evidence.user_frame.expression
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        index = max(i for i, f in enumerate(evidence.frames) if f is evidence.user_frame)
        producer = find_producer(
            node.func.value, evidence.frames, index, to_torch(facts["has"]), evidence.names
        )
        facts["origin"] = producer.describe(facts["has"])
        return make_finding("RN013", evidence, evidence.user_frame, **facts)
    return None


def _find_later_conversions(frame: CallFrame) -> list[str]:
    """Returns the later lines of the running function that convert a tensor to NumPy whose dtype
    NumPy does not have.
    """
    lines = []
    for node in () if frame.scope is None else ast.walk(frame.scope):
        match node:
            case ast.Call(ast.Attribute(owner, "numpy")) if node.lineno > frame.line:
                value = read_value(owner, frame)
                if is_tensor(value) and value.dtype == torch.bfloat16:
                    lines.append(
                        f"`{add_brackets(ast.unparse(owner))}.float()` at line {node.lineno}"
                    )
    return lines
