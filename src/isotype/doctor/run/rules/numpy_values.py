"""Recognises dtypes that NumPy does not have, and arrays of NumPy that PyTorch cannot convert."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....dtypes import format_dtype, to_torch
from ....finding import Finding
from ..arguments import find_passed_argument
from ..array_contents import (
    ArrayContents,
    TableSource,
    find_array_expression,
    find_table,
    read_contents,
)
from ..arrays import find_assigned_array
from ..evidence import NUMPY_DTYPE, UNCONVERTIBLE_ARRAY, Evidence
from ..expressions import is_tensor, node_keyword, read_value
from ..frames import CallFrame, source_text
from ..model_casts import find_tensor_format
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
        loaded=_load_as_floats(call) if reads_file else "",
        numpy_dtype=name if name in _NUMPY_FLOATS else "float32",
        exists=name in _NUMPY_FLOATS,
    )


def _load_as_floats(call: ast.AST | None) -> str:
    """Returns code that reads the arrays of `load_file(...)` of safetensors by torch, in fp32, or ""."""
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("load_file"):
        return ""
    loading = source_text(ast.Call(ast.Name("load_file"), call.args, call.keywords))
    tensors = f"safetensors.torch.{loading}.items()"
    return f"{{name: tensor.float().numpy() for name, tensor in {tensors}}}"


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
                    cast = f"`{add_brackets(ast.unparse(owner))}.float()`"
                    lines.append(f"{cast} at {frame.location_of(node)}")
    return lines


def find_unconvertible_array(evidence: Evidence) -> Finding | None:
    """Finds an array of NumPy whose dtype PyTorch does not have: objects, texts or times."""
    match = UNCONVERTIBLE_ARRAY.search(evidence.message)
    if match is None:
        return None
    numpy_dtype = match["name"].removesuffix("_")
    if not evidence.failing_frame.is_user_code:
        return _find_unconvertible_column(evidence, numpy_dtype)
    source = _find_array_source(evidence)
    if source is None:
        return None
    node, frame, array = source
    table = find_table(node, frame)
    if table is not None and not isinstance(array, np.ndarray):
        array = table.table.to_numpy()
    contents = read_contents(array) if isinstance(array, np.ndarray) else ArrayContents("")
    is_in_table = table is not None and contents.element
    return make_finding(
        "RN040",
        evidence,
        replace(frame, line=getattr(node, "lineno", frame.line)),
        value=source_text(node),
        at=frame.location_of(node),
        elements=_name_elements(numpy_dtype),
        kind=contents.kind,
        element=contents.element,
        position=contents.position,
        column=table.find_column(contents.position) if table is not None and is_in_table else "",
        columns="" if table is None else table.describe_columns(),
        several=table is not None and len({dtype for _, dtype in table.columns}) > 1,
        change=_convert_array(node, table, contents, _read_wanted_dtype(evidence.failing_frame)),
    )


def _find_array_source(evidence: Evidence) -> tuple[ast.expr, CallFrame, Any] | None:
    """Returns the expression of the array that a call could not convert, its frame, and the array,
    if a variable holds it. A parameter is followed to the call of its function.
    """
    frames = [frame for frame in evidence.frames if not frame.is_forwarding]
    frame = frames.pop()
    node = find_array_expression(frame)
    if node is None:
        return None
    array = read_value(node, frame)
    while isinstance(node, ast.Name) and frames and frames[-1].is_user_code:
        passed = find_passed_argument(frame, frames[-1], node.id)
        if passed is None:
            break
        node, frame = passed, frames.pop()
    if isinstance(node, ast.Name):
        assigned = find_assigned_array(node.id, frame)
        node = node if assigned is None else assigned
    return node, frame, array


def _read_wanted_dtype(frame: CallFrame) -> str:
    """Returns the dtype of NumPy for the dtype that a conversion asks for; float32 without one."""
    call = frame.expression
    node = node_keyword(call, "dtype") if isinstance(call, ast.Call) else None
    dtype = None if node is None else read_value(node, frame)
    is_integer = isinstance(dtype, torch.dtype) and not dtype.is_floating_point
    return str(dtype).removeprefix("torch.") if is_integer else "float32"


def _convert_array(
    node: ast.expr, table: TableSource | None, contents: ArrayContents, dtype: str
) -> str:
    """Returns code for an array of numbers in a dtype that PyTorch has, or "" if the elements have
    to be changed first.
    """
    text = add_brackets(source_text(node))
    if contents.kind in ("numbers", "missing"):
        if table is None:
            if contents.kind == "missing" and contents.element != "None":
                return ""  # NumPy makes NaN of None only
            return f'{text}.astype("{dtype}")'
        missing = ', na_value=float("nan")' if contents.kind == "missing" else ""
        return f'{add_brackets(table.text)}.to_numpy(dtype="{dtype}"{missing})'
    if contents.kind == "rows":
        return f'numpy.stack({source_text(node)}).astype("{dtype}")'
    if contents.kind == "dtype":
        return f'{text}.astype("{dtype}")'
    return ""


def _find_unconvertible_column(evidence: Evidence, numpy_dtype: str) -> Finding | None:
    """Finds the column of a dataset that a library could not convert: the variable of a running
    function of the library holds the arrays of all columns.
    """
    inner = evidence.frames[evidence.frames.index(evidence.user_frame) + 1 :]
    for frame in reversed(inner):
        for row in frame.variables.values():
            if type(row) is not dict:
                continue
            names = [name for name, value in row.items() if _has_dtype(value, numpy_dtype)]
            others = [str(name) for name in row if name not in names]
            if not names or not others:
                continue
            setter = find_tensor_format(evidence.frames, others)
            return make_finding(
                "RN040",
                evidence,
                elements=_name_elements(numpy_dtype),
                kind="column",
                column=" and ".join(map(str, names)),
                at=evidence.user_frame.location,
                value=evidence.user_frame.text,
                setter="" if setter is None else setter.text,
                setter_at="" if setter is None else setter.location,
                change="" if setter is None else setter.function,
                columns=repr(others),
            )
    return None


def _name_elements(numpy_dtype: str) -> str:
    return {"object": "objects", "str": "texts"}.get(numpy_dtype, numpy_dtype)


def _has_dtype(value: Any, numpy_dtype: str) -> bool:
    is_array = isinstance(value, (np.ndarray, np.generic))
    return is_array and value.dtype.type.__name__.removesuffix("_") == numpy_dtype
