"""Recognises operators of C++ that fail in backward."""

from __future__ import annotations

import ast
import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch

from ....dtypes import format_dtype
from ....finding import Finding
from ....observe.origin import is_library_file
from ..evidence import Evidence, Operand
from ..expressions import node_keyword
from ..failed_node import FailedNode, find_failed_node
from ..frames import CallFrame, make_called_frame, source_text
from ..operand_origins import add_value_origins, add_weight_origins
from ..producer import Producer
from ..recorded_calls import find_recorded_producer, find_region_location
from .findings import make_finding
from .operands import add_brackets

_VMAP_FILE = os.path.join("torch", "_functorch", "apis.py")


def find_failed_operator(evidence: Evidence) -> Finding | None:
    """Finds the operator of forward whose backward failed in C++, and the dtypes of its gradient and
    its operands. Losses have a rule of their own.
    """
    node = find_failed_node(evidence.message, evidence.frames, evidence.autocast)
    if node is None or "LossBackward" in node.name or "CrossEntropyBackward" in node.name:
        return None
    dtypes = {node.gradient_dtype, *(tensor.dtype for tensor in node.saved.values())}
    if len(dtypes) < 2:
        return None
    forward = None
    if node.call is not None:
        forward = make_called_frame(*node.call.running)
    evidence = _replace_operands(evidence, node)
    others = [operand for operand in evidence.operands if operand.dtype != node.gradient_dtype]
    vmap_frame = _find_vmap_call(evidence.frames) if node.needs_vmap else None
    is_user_line = forward is not None and forward.is_user_code
    finding = make_finding(
        "RN041",
        evidence,
        forward if is_user_line else None,
        node=node.name,
        call="" if forward is None else _read_expression(forward),
        at="" if forward is None else forward.location,
        gradient=format_dtype(node.gradient_dtype),
        others=" and ".join(operand.path or operand.label for operand in others),
        verb="are" if len(others) > 1 else "is",
        others_dtype=others[0].dtype_name,
        accepted="" if node.accepted_dtype is None else format_dtype(node.accepted_dtype),
        device=evidence.device,
        vmap="" if vmap_frame is None else _read_expression(vmap_frame),
        vmap_at="" if vmap_frame is None else vmap_frame.location,
        loop="" if vmap_frame is None else _write_loop(vmap_frame, evidence.frames),
        **_describe_region(node, forward, node.accepted_dtype or others[0].dtype),
    )
    finding = add_weight_origins(add_value_origins(finding, evidence), evidence)
    phase = _describe_forward(node)
    return dataclasses.replace(finding, details=(*finding.details, ("in forward", phase)))


def _describe_forward(node: FailedNode) -> str:
    if node.call is None:
        return "not recorded"
    if node.call.autocast is None:
        return "autocast off"
    location = find_region_location(node.call.region)
    since = f", since {location}" if location else ""
    return f"autocast on, {format_dtype(node.call.autocast)}{since}"


def _describe_region(
    node: FailedNode, forward: CallFrame | None, wanted: torch.dtype
) -> dict[str, Any]:
    """Returns the facts about autocast in forward, if the gradient has its dtype, and the statement
    of forward with all operands in the dtype `wanted`.
    """
    call = node.call
    if call is None or forward is None or call.autocast != node.gradient_dtype:
        return {}
    location = find_region_location(call.region)
    statement = ""
    if forward.is_user_code:
        statement = _cast_arguments(forward, call.argument_dtypes, wanted)
    return {
        "autocast": True,
        "region": f" ({location})" if location else "",
        "statement": statement,
    }


def _cast_arguments(
    frame: CallFrame, dtypes: Sequence[torch.dtype | None], wanted: torch.dtype
) -> str:
    """Returns the statement of a frame, with casts of the arguments of its call that have another
    dtype than `wanted`. Returns "" for a statement that contains other statements.

    dtypes  the dtypes of the arguments. A method's receiver is the first argument
    """
    statement = copy.deepcopy(frame.statement)
    if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr, ast.AugAssign)):
        return ""
    wanted_text = ast.unparse(frame.expression or statement)
    for call in ast.walk(statement):
        if not isinstance(call, ast.Call) or ast.unparse(call) != wanted_text:
            continue
        nodes: list[ast.expr] = list(call.args)
        match call.func:
            case ast.Attribute(receiver) if len(dtypes) == len(nodes) + 1:
                nodes.insert(0, receiver)
        casts = [
            _cast(node, wanted) if _needs_cast(dtype, wanted) else node
            for node, dtype in zip(nodes, dtypes)
        ]
        if isinstance(call.func, ast.Attribute) and len(nodes) > len(call.args):
            call.func.value = casts.pop(0)
        call.args = [*casts, *call.args[len(casts) :]]
    return source_text(statement)


def _needs_cast(dtype: torch.dtype | None, wanted: torch.dtype) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype != wanted


def _cast(node: ast.expr, dtype: torch.dtype) -> ast.expr:
    return ast.parse(f"{add_brackets(ast.unparse(node))}.to({dtype})", mode="eval").body


def _read_expression(frame: CallFrame) -> str:
    node = frame.expression
    return source_text(node) if isinstance(node, ast.expr) else frame.text


def _replace_operands(evidence: Evidence, node: FailedNode) -> Evidence:
    """Returns the evidence with the gradient and the saved operands of a node as its operands."""
    gradient = Operand(
        "gradient",
        node.gradient_dtype,
        node.gradient_shape,
        next(iter(node.saved.values())).device,
        "",
        0,
        ast.Name("gradient"),
        None,
    )
    operands, producers = [gradient], {}
    for name, tensor in node.saved.items():
        path = evidence.names.tensor_path(tensor) or ""
        operand = Operand(
            name,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.device,
            path,
            0,
            ast.Name(name),
            tensor,
            evidence.names.find_tensor(tensor),
        )
        producer = None if path else find_recorded_producer(tensor, evidence.frames, evidence.names)
        operands.append(operand)
        producers[id(operand)] = producer or Producer("unknown", name, "", "")
    producers[id(gradient)] = Producer("unknown", "gradient", "", "")
    has_line = node.call is not None
    return dataclasses.replace(
        evidence, operands=operands, producers=producers, has_forward_line=has_line
    )


def _find_vmap_call(frames: Sequence[CallFrame]) -> CallFrame | None:
    """Returns the user's frame that called the function of `torch.vmap`."""
    caller = None
    for frame in frames:
        if frame.file.endswith(_VMAP_FILE):
            return caller
        if not is_library_file(frame.file):
            caller = frame
    return None


def _write_loop(frame: CallFrame, frames: Sequence[CallFrame]) -> str:
    """Returns code that calls the function of `torch.vmap` for each row, or "" if the function has
    several arguments or results, or other options decide which rows it gets.
    """
    match frame.expression:
        case ast.Call(ast.Call(_, [ast.Name(name)]) as vmap, [rows], []):
            options = [node_keyword(vmap, option) for option in ("in_dims", "out_dims")]
            function = next((f for f in frames if f.function == name), None)
            if any(option is not None for option in options) or function is None:
                return ""
            results = [
                node.value
                for node in ast.walk(function.scope or ast.Pass())
                if isinstance(node, ast.Return)
            ]
            if len(results) == 1 and not isinstance(results[0], (ast.Tuple, ast.List, ast.Dict)):
                return f"torch.stack([{name}(row) for row in {source_text(rows)}])"
    return ""
