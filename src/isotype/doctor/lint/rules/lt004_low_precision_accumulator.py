from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..dataflow.arguments import GRADIENT
from ..dataflow.events import Event
from ..dataflow.functions import function_classes
from ..dataflow.plain import plain_events
from ..dataflow.torch_names import LOWER
from ..dataflow.values import Tensor
from ..rule import Edit, FixSafety, Hit, Rule
from ..source import SourceFile, keyword, last_name
from .evidence import details


class LowPrecisionAccumulator(Rule):
    """a gradient is summed over chunks in a buffer of the inputs' dtype

    Why
    ---
    bf16 keeps 8 bits. A sum of many parts loses each part that is smaller than 1/256 of the sum so far: over 256 parts the error is
    1.5% in bf16 and 0.02% in fp32. One matrix product over all rows has no such loss, since it accumulates in fp32 inside; cutting it
    into chunks and adding them up in `zeros_like(weight)` brings it back.

    Example
    -------
    ```python
    grad_w = torch.zeros_like(w)
    for h_chunk, d_chunk in chunks:
        grad_w += d_chunk.t() @ h_chunk
    ```

    Use instead
    -----------
    ```python
    grad_w = torch.zeros_like(w, dtype=torch.float32)
    for h_chunk, d_chunk in chunks:
        grad_w += d_chunk.t() @ h_chunk
    return grad_w.to(w.dtype)
    ```

    Fix safety
    ----------
    Unsafe: `dtype=torch.float32` is added to the buffer, which then takes twice the memory and may be returned as fp32.

    Known problems
    --------------
    A sum into an argument is left to the caller. Only buffers of autograd.Functions, those whose name says gradient, and sums of matrix
    products in a function whose name does, are looked at. How many parts are
    summed is not known here: a loop over two experts loses little.
    """

    code = "LT004"
    name = "low-precision-accumulator"
    on = False
    by_name = True
    first_look = (13, 18)
    in_tests = False
    fix_safety = FixSafety.UNSAFE

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        inside = [(e, True) for function in function_classes(file) for e in function.events]
        outside = [(e, False) for e in plain_events(file)]
        found: dict[ast.expr | ast.stmt, Event] = {}  # one finding for each buffer
        for event, anyhow in (*inside, *outside):
            if _loses(event, anyhow):
                at = event.value if isinstance(event.value, ast.Call) else event.node
                if at in file.parents:
                    found.setdefault(at, event)
        for at in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
            yield _hit(found[at], at, file.symbol(at))


def _loses(event: Event, inside_function: bool) -> bool:
    """Whether this sum is a gradient kept in the low precision of the inputs, its buffer included."""
    if event.kind != "accumulate":
        return False
    name, buffer = event.operands[0]
    if event.operation == "sum()":
        return False
    allocated = isinstance(event.value, ast.Call)
    a_gradient = bool(GRADIENT.search(name)) or (inside_function and event.phase == "backward" and allocated)
    of_products = allocated and "grad" in (event.symbol or "").rpartition(".")[2] and _is_product(event)
    if not (a_gradient or of_products) or not buffer.low or event.scenario.autocast or buffer.zero_dim or event.loop is None:
        return False
    if isinstance(event.loop, ast.For) and _few_parts(event.loop.iter):
        return False
    return not any(_starts_anew(node, name) for node in ast.walk(event.loop))


def _few_parts(over: ast.expr) -> bool:
    """A loop over losses, terms or the entries of a mapping: a handful, whose sum loses little."""
    name = last_name(over)
    return name in ("items", "values") or bool(re.search(r"(^|_)(terms|losses)$", name))


def _is_product(event: Event) -> bool:
    """Whether what is added is a matrix product, written in the same statement."""
    return any(
        (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)) or (isinstance(node, ast.Call) and last_name(node.func) in LOWER)
        for node in ast.walk(event.node)
    )


def _starts_anew(node: ast.AST, name: str) -> bool:
    """Whether this statement of the loop gives the name a value that has nothing to do with its former one."""
    if not isinstance(node, ast.Assign) or not any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
        return False
    return not any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node.value))


def _hit(event: Event, at: ast.expr | ast.stmt, symbol: str | None) -> Hit:
    name, buffer = event.operands[0]
    allocated = isinstance(at, ast.Call)
    how = last_name(at.func) if isinstance(at, ast.Call) else "the first part"
    return Hit(
        node=at,
        message=f"`{name}` accumulates over a loop (line {event.node.lineno}) in {buffer.dtype} for {event.scenario.inputs} inputs",
        cause=f"{how} gives the accumulator the inputs' dtype; each addition rounds to {buffer.dtype}, and parts below "
        "1/256 of the sum are lost. float32 keeps them",
        fix=f"{'allocate it with' if allocated else 'start from torch.zeros(...) with'} dtype=torch.float32, and cast once after the loop",
        details=details(event),
        symbol=symbol,
        scenario=event.scenario,
        weak=_chosen(event, name, buffer, allocated),
        edit=Edit.at("keyword", at, "dtype=torch.float32")
        if isinstance(at, ast.Call) and how.endswith("_like") and not keyword(at, "dtype")
        else None,
    )


def _chosen(event: Event, name: str, buffer: Tensor, allocated: bool) -> str:
    """Why the accumulator's dtype is somebody's choice, or ""."""
    if not allocated and buffer.why == f"the argument {name}":
        return "the caller made what is added to, in a dtype of its choice"
    asked = next((test for test in event.path if re.fullmatch(r"\w*dtype is None is true", test)), None)
    return f"the argument {asked.partition(' ')[0]} chooses the accumulator's dtype" if asked else ""
