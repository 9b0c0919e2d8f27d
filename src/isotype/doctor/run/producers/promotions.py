"""Continues the search at the operand that gave the result of an operation its dtype."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ....dtypes import format_dtype
from ..expressions import UNKNOWN, creates_integers, is_tensor, read_value
from ..frames import source_text
from ..producer import Producer, Promotion
from .autocast import AUTOCAST_FUNCTIONS, follow_autocast
from .search import Search

_FOLLOWED_OPERANDS = (ast.Call, ast.BinOp, ast.Name, ast.Attribute, ast.ListComp, ast.Subscript)


def follow_widest(
    search: Search, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
) -> Producer:
    """Continues the search at the first operand that has the wanted dtype. If no operand has
    it, the search continues at the operands whose values cannot be read. If these do not lead
    to a proof either, the operation itself gave its result the dtype.
    """
    frame = search.frame_at(index, line)
    for operand in nodes:
        value = read_value(operand, frame)
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(is_tensor(item) and item.dtype == search.dtype for item in items):
            add_promotion(search, node, operand, index)
            result = search.follow(operand, index, line)
            return find_cast_operand(search, result, nodes, node, index, line) or result
    computed = follow_autocast(search, node, index, line)
    if computed is not None:
        return computed
    results = follow_unread_operands(search, nodes, node, index, line)
    if results and results[-1].is_proven:
        return results[-1]
    computed = find_integer_operation(search, nodes, node, index, line)
    if computed is not None:
        return computed
    if any(creates_integers(operand) for operand in nodes):
        return search.producer("call", node, index)  # it makes floats of them
    known = [result for result in results if result.kind != "unknown"]
    return (known or results or [search.producer("call", node, index)])[0]


def follow_unread_operands(
    search: Search, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
) -> list[Producer]:
    """Continues the search at the operands whose values cannot be read, up to the first that proves
    the dtype.
    """
    frame = search.frame_at(index, line)
    results: list[Producer] = []
    for operand in nodes:
        if not isinstance(operand, _FOLLOWED_OPERANDS):
            continue
        if read_value(operand, frame) is not UNKNOWN:
            continue
        count = len(search.promotions)
        add_promotion(search, node, operand, index)
        results.append(search.follow(operand, index, line))
        if results[-1].is_proven:
            break
        del search.promotions[count:]
    return results


def find_integer_operation(
    search: Search, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
) -> Producer | None:
    """Returns the operation if it computes floats of the wanted dtype from integers."""
    frame = search.frame_at(index, line)
    result = read_value(node, frame)
    values = [read_value(operand, frame) for operand in nodes]
    dtypes = {value.dtype for value in values if is_tensor(value)}
    if not dtypes or any(dtype.is_floating_point for dtype in dtypes):
        return None
    if not is_tensor(result) or result.dtype != search.dtype:
        return None
    names = " and ".join(sorted(map(format_dtype, dtypes)))
    producer = search.producer("call", node, index, is_proven=True)
    return replace(producer, reason=f"it computes floats from {names}")


def find_cast_operand(
    search: Search, result: Producer, nodes: Sequence[ast.AST], node: ast.AST, index: int, line: int
) -> Producer | None:
    """Returns the cast of another operand of a function that has returned, if the operation
    needs one dtype. The code cast this operand to the dtype of a table that an object holds,
    such as the filters of a spectrogram.
    """
    if index < search.running_count or result.kind not in ("attribute", "creation"):
        return None
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)
    name = source_text(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if not is_product and name not in AUTOCAST_FUNCTIONS:
        return None
    for operand in nodes:
        if isinstance(operand, _FOLLOWED_OPERANDS):
            other = search.follow(operand, index, line)
            if other.kind == "cast" and other.is_proven:
                return other
    return None


def add_promotion(search: Search, node: ast.AST, operand: ast.AST, index: int) -> None:
    """Adds an operation of two tensors to the list of promotions. Only the lines of running
    functions are listed, because only their variables can be read.
    """
    frame = search.frames[index]
    if index >= search.running_count or not frame.is_user_code:
        return
    if isinstance(node, ast.BinOp) and not isinstance(node.right, ast.Constant):
        operation = type(node.op).__name__.replace("Mult", "Mul")
    elif isinstance(node, ast.Call):
        operation = source_text(node.func).rpartition(".")[2].capitalize()
    else:
        return
    search.promotions.append(Promotion(operation, source_text(operand), frame.location_of(operand)))
