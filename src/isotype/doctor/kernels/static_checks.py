"""Faults that compile: sums in low precision, unintended fp64 arithmetic, offsets that overflow int32.

They read the typed syntax tree of a combination that compiled, so `acc` is known to be bf16 rather than guessed to be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from ...finding import Severity
from .fault import Fault
from .observe import Frame, Observation
from .provenance import LOW, assigns, call_name, names_in, origin, source_text, variable_of

_SUMS = ("sum", "cumsum")


def static_faults(kernel: str, observation: Observation) -> Iterator[Fault]:
    """Faults of one combination that compiled; the same fault of several functions or combinations is merged by the caller."""
    for frame in observation.frames:
        if frame.in_triton or frame.tree is None:
            continue
        yield from _low_precision_sums(kernel, frame)
        yield from _own_reductions(kernel, frame, observation)
        yield from _low_precision_atomics(kernel, frame)
        yield from _low_precision_dots(kernel, frame)
        yield from _fp64_arithmetic(kernel, frame)
        yield from _int32_offsets(kernel, frame)


def _fault(
    code: str,
    severity: Severity,
    kernel: str,
    frame: Frame,
    node: ast.AST,
    variable: str,
    message: str,
    *,
    cause: str,
    fix: str,
    dtypes: tuple = (),
) -> Fault:
    return Fault(code, frame.file, frame.line(node), kernel, variable, message, cause, fix, dtypes=dtypes, severity=severity)


def _low_precision_sums(kernel: str, frame: Frame) -> Iterator[Fault]:
    for loop in [n for n in frame.nodes() if isinstance(n, (ast.For, ast.While))]:
        for statement in [n for part in loop.body for n in ast.walk(part)]:
            name = _accumulated(statement)
            if name is None or not _lives_across(frame, name, loop):
                continue
            dtype = next((b.dtype for b in reversed(frame.bindings) if b.node is statement and b.name == name), None)
            if dtype in LOW:
                cause = f"`{source_text(statement)}` adds into a {dtype} value once a round: each addition rounds"
                fix = f"start {name} in fp32 (tl.zeros(..., dtype=tl.float32)), widen what is added, and cast once at the store"
                yield _fault(
                    "KN020",
                    Severity.WARNING,
                    kernel,
                    frame,
                    statement,
                    name,
                    f"{name} accumulates in {dtype}",
                    cause=cause,
                    fix=fix,
                    dtypes=(dtype, "fp32"),
                )
    for call in [n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) in _SUMS]:
        argument = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        dtype = frame.dtypes.get(call)
        if argument is None or dtype not in LOW or frame.dtypes.get(argument) not in LOW:
            continue
        cause = f"`{source_text(call)}` adds in {dtype}: Triton's {call_name(call)} keeps its argument's dtype"
        yield _fault(
            "KN020",
            Severity.WARNING,
            kernel,
            frame,
            call,
            variable_of(argument),
            f"{call_name(call)} of {variable_of(argument)} is computed in {dtype}",
            cause=cause,
            fix=f"widen first: {variable_of(argument)}.to(tl.float32), and cast the result",
            dtypes=(dtype, "fp32"),
        )


def _own_reductions(kernel: str, frame: Frame, observation: Observation) -> Iterator[Fault]:
    """`tl.reduce` and `tl.associative_scan` with a function of the program's own that adds its arguments."""
    adding = {one.name.rpartition(".")[2] for one in observation.frames if one.tree is not None and _returns_a_sum(one.tree)}
    for call in [n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) in ("reduce", "associative_scan")]:
        dtype = frame.dtypes.get(call)
        combine = next((a.id for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Name) and a.id in adding), None)
        if dtype not in LOW or combine is None or not call.args:
            continue
        yield _fault(
            "KN020",
            Severity.WARNING,
            kernel,
            frame,
            call,
            variable_of(call.args[0]),
            f"{combine} over {variable_of(call.args[0])} is computed in {dtype}",
            cause=f"`{source_text(call)}` adds in {dtype}: {combine} gets its arguments in their own dtype and every addition rounds",
            fix=f"widen first: {variable_of(call.args[0])}.to(tl.float32), and cast the result",
            dtypes=(dtype, "fp32"),
        )


def _returns_a_sum(tree: ast.AST) -> bool:
    returns = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return)]
    return len(returns) == 1 and isinstance(returns[0], ast.BinOp) and isinstance(returns[0].op, ast.Add)


def _low_precision_atomics(kernel: str, frame: Frame) -> Iterator[Fault]:
    """`tl.atomic_add` to a bf16 or fp16 buffer: the running sum is low precision, even if each addend was computed in fp32."""
    for call in [n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) == "atomic_add"]:
        pointer = call.args[0] if call.args else None
        held = frame.dtypes.get(pointer, "").lstrip("*") if pointer is not None else ""
        if held not in LOW or pointer is None:
            continue
        fault = _fault(
            "KN020",
            Severity.WARNING,
            kernel,
            frame,
            call,
            variable_of(pointer),
            f"atomic_add sums in {held}, in the memory of {variable_of(pointer)}",
            cause=f"`{source_text(call)}` adds to {held} memory: each addition rounds, and in an order that differs from run to run",
            fix="add into an fp32 buffer and cast it once afterwards",
            dtypes=(held, "fp32"),
        )
        yield replace(fault, statistic=True)


def _accumulated(statement: ast.AST) -> str | None:
    """The name that a statement adds to: `x += y`, `x = x + y`, `x = tl.dot(a, b, x)`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name) and isinstance(statement.op, (ast.Add, ast.Sub)):
        return statement.target.id
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        name, value = statement.targets[0].id, statement.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
            operands = (value.left, value.right)
            if any(isinstance(side, ast.Name) and side.id == name for side in operands):
                return name
        if call_name(value) in ("dot", "fma"):
            assert isinstance(value, ast.Call)
            if any(isinstance(a, ast.Name) and a.id == name for a in [*value.args[2:], *(k.value for k in value.keywords)]):
                return name
    return None


def _lives_across(frame: Frame, name: str, loop: ast.AST) -> bool:
    """Whether the name holds a value from before the loop, and is not started anew in it."""
    inside = set(ast.walk(loop))
    anew = any(isinstance(n, ast.Assign) and assigns(n, name) and name not in names_in(n.value) for n in inside)
    before = any(b.name == name and b.node not in inside and assigns(b.node, name) for b in frame.bindings)
    return before and not anew


def _low_precision_dots(kernel: str, frame: Frame) -> Iterator[Fault]:
    for call in [n for n in frame.nodes() if call_name(n) == "dot" and n in frame.dtypes]:
        dtype = frame.dtypes[call]
        if dtype in LOW:
            cause = f"`{source_text(call)}` accumulates its products in {dtype}"
            yield _fault(
                "KN020",
                Severity.WARNING,
                kernel,
                frame,
                call,
                variable_of(getattr(call, "args", [call])[0]),
                f"tl.dot accumulates in {dtype}",
                cause=cause,
                fix="leave out_dtype at fp32 (the default) and cast the result",
                dtypes=(dtype, "fp32"),
            )


def _fp64_arithmetic(kernel: str, frame: Frame) -> Iterator[Fault]:
    if any("fp64" in word for word in frame.parameters.values()):
        return  # fp64 came in through the signature: meant, or a variation of ours
    for node, dtype in frame.dtypes.items():
        if dtype == "fp64" and isinstance(node, ast.BinOp) and (where := origin(frame, node)) is not None:
            cause = f"no parameter is fp64, and `{source_text(node)}` is: {where.text}"
            yield _fault(
                "KN021",
                Severity.WARNING,
                kernel,
                frame,
                node,
                variable_of(node),
                f"{variable_of(node)} is computed in fp64",
                cause=cause,
                fix="keep constants inside fp32's range and cast to tl.float32",
                dtypes=("fp64", "fp32"),
            )
            return


def _int32_offsets(kernel: str, frame: Frame) -> Iterator[Fault]:
    """`program_id * n_cols` in int32, added to a pointer: past 2**31 elements it wraps (131072 x 16384 is enough)."""
    for node in [n for n in frame.nodes() if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]:
        if frame.dtypes.get(node) != "int32" or frame.shapes.get(node):
            continue
        left, right = names_in(node.left), names_in(node.right)
        sizes = [n for n in left + right if frame.parameters.get(n) == "int32"]
        programs = [n for n in left + right if _is_program_id(frame, n)] or ["tl.program_id"] * ("program_id" in source_text(node))
        if sizes and programs and _meets_pointer(frame, node):
            row = programs[0]
            cause = f"`{source_text(node)}` is int32 and is added to a pointer: it wraps from 2**31 elements on (16,384 rows of 131,072)"
            yield _fault(
                "KN022",
                Severity.NOTE,
                kernel,
                frame,
                node,
                row,
                f"the offset `{source_text(node)}` is computed in int32",
                cause=cause,
                fix=f"widen first: {row}.to(tl.int64) * ...",
                dtypes=("int32", "int64"),
            )
            return


def _is_program_id(frame: Frame, name: str) -> bool:
    return any(
        b.name == name and assigns(b.node, name) and call_name(getattr(b.node, "value", None) or ast.Pass()) == "program_id"
        for b in frame.bindings
    )


def _meets_pointer(frame: Frame, product: ast.AST) -> bool:
    for outer in frame.nodes():
        added = isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Add) and frame.dtypes.get(outer, "").startswith("*")
        grown = (
            isinstance(outer, ast.AugAssign)
            and isinstance(outer.target, ast.Name)
            and any(b.node is outer and b.dtype.startswith("*") for b in frame.bindings)
        )
        if (added or grown) and any(n is product for n in ast.walk(outer)):
            return True
    return False
