"""Faults of what compiles: sums in low precision, unintended fp64 arithmetic, offsets that overflow int32 (KN020 to KN022); with `binary`,
what the machine code needs (registers, spills, shared memory).

The first read the typed syntax tree of a combination that compiled, so `acc` is known to be bf16 rather than guessed to be.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...finding import Finding, Place, Severity
from .observe import Frame, Observation
from .provenance import LOW, Fault, assigns, call_name, names_in, origin, source_text, variable_of
from .signature import limits, place_of, target_name

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


def _sum_in(dtype: str, kernel: str, frame: Frame, node: ast.AST, variable: str, message: str, *, cause: str, fix: str) -> Fault:
    """A sum that is kept in bf16 or fp16."""
    place = frame.file, frame.line(node)
    return Fault("KN020", *place, kernel, variable, message, cause, fix, dtypes=(dtype, "fp32"), severity=Severity.WARNING)


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
                yield _sum_in(dtype, kernel, frame, statement, name, f"{name} accumulates in {dtype}", cause=cause, fix=fix)
    for call in [n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) in _SUMS]:
        argument = call.args[0] if call.args else call.func.value if isinstance(call.func, ast.Attribute) else None
        dtype = frame.dtypes.get(call)
        if argument is None or dtype not in LOW or frame.dtypes.get(argument) not in LOW:
            continue
        cause = f"`{source_text(call)}` adds in {dtype}: Triton's {call_name(call)} keeps its argument's dtype"
        name = variable_of(argument)
        fix = f"widen first: {name}.to(tl.float32), and cast the result"
        yield _sum_in(dtype, kernel, frame, call, name, f"{call_name(call)} of {name} is computed in {dtype}", cause=cause, fix=fix)


def _own_reductions(kernel: str, frame: Frame, observation: Observation) -> Iterator[Fault]:
    """`tl.reduce` and `tl.associative_scan` with a function of the program's own that adds its arguments."""
    adding = {one.name.rpartition(".")[2] for one in observation.frames if one.tree is not None and _returns_a_sum(one.tree)}
    for call in [n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) in ("reduce", "associative_scan")]:
        dtype = frame.dtypes.get(call)
        combine = next((a.id for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Name) and a.id in adding), None)
        if dtype not in LOW or combine is None or not call.args:
            continue
        name = variable_of(call.args[0])
        cause = f"`{source_text(call)}` adds in {dtype}: {combine} gets its arguments in their own dtype and every addition rounds"
        fix = f"widen first: {name}.to(tl.float32), and cast the result"
        yield _sum_in(dtype, kernel, frame, call, name, f"{combine} over {name} is computed in {dtype}", cause=cause, fix=fix)


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
        name, message = variable_of(pointer), f"atomic_add sums in {held}, in the memory of {variable_of(pointer)}"
        cause = f"`{source_text(call)}` adds to {held} memory: each addition rounds, and in an order that differs from run to run"
        fix = "add into an fp32 buffer and cast it once afterwards"
        yield replace(_sum_in(held, kernel, frame, call, name, message, cause=cause, fix=fix), statistic=True)


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
            name, fix = variable_of(getattr(call, "args", [call])[0]), "leave out_dtype at fp32 (the default) and cast the result"
            yield _sum_in(dtype, kernel, frame, call, name, f"tl.dot accumulates in {dtype}", cause=cause, fix=fix)


def _fp64_arithmetic(kernel: str, frame: Frame) -> Iterator[Fault]:
    if any("fp64" in word for word in frame.parameters.values()):
        return  # fp64 came in through the signature: meant, or a variation of ours
    for node, dtype in frame.dtypes.items():
        if dtype == "fp64" and isinstance(node, ast.BinOp) and (where := origin(frame, node)) is not None:
            cause = f"no parameter is fp64, and `{source_text(node)}` is: {where.text}"
            name, fix = variable_of(node), "keep constants inside fp32's range and cast to tl.float32"
            place, message = (frame.file, frame.line(node)), f"{name} is computed in fp64"
            yield Fault("KN021", *place, kernel, name, message, cause, fix, dtypes=("fp64", "fp32"), severity=Severity.WARNING)
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
            place, message = (frame.file, frame.line(node)), f"the offset `{source_text(node)}` is computed in int32"
            fix = f"widen first: {row}.to(tl.int64) * ..."
            yield Fault("KN022", *place, kernel, row, message, cause, fix, dtypes=("int32", "int64"), severity=Severity.NOTE)
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


MANY_SPILLS = 64  # 4-byte values a thread; fewer cost nothing one can measure


@dataclass(frozen=True)
class Usage:
    """The resources of one compiled program. None where the tool that reports them is not installed."""

    registers: int | None
    spills: int | None
    shared_bytes: int

    @property
    def written(self) -> str:
        known = [("registers", self.registers), ("spilled values", self.spills)]
        return ", ".join([f"{n} {label}" for label, n in known if n is not None] + [f"{self.shared_bytes:,} bytes of shared memory"])


def binary_findings(function: Any, observations: Sequence[Observation], targets: Sequence[Any]) -> tuple[list[Finding], list[str]]:
    """One signature a dtype and target: the first combination of each. Returns findings, and a line of usage for each program made."""
    findings: list[Finding] = []
    usages: list[str] = []
    for target in targets:
        chosen: dict[tuple[str, ...], Observation] = {}
        for one in observations:
            if one.target == target_name(target):
                words = tuple(sorted({str(w) for w in one.combination.types.values() if str(w).startswith("*")}))
                chosen.setdefault(words, one)
        for one in chosen.values():
            found, usage = _compiled(function, one, target)
            findings += found
            if usage:
                usages.append(f"{function.__name__} {target_name(target)} {one.combination.label}: {usage.written}")
    return findings, usages


def _compiled(function: Any, observation: Observation, target: Any) -> tuple[list[Finding], Usage | None]:
    combination, where = observation.combination, target_name(target)
    file, line = place_of(function)
    place = Place(file=file, line=line, symbol=function.__name__)
    details: tuple[tuple[str, str], ...] = (
        ("kernel", function.__name__),
        ("signature", combination.written),
        ("target", where),
        ("reach", combination.reach.words),
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints a whole PTX file when ptxas refuses it
            usage = machine_code(function, combination, target)
    except Exception as error:
        text = " ".join(str(error).split())[:400] or type(error).__name__
        cause = f"the front end accepts {combination.label}; a later stage for {where} does not: {type(error).__name__}: {text}"
        fix = (
            "try other block sizes, num_warps and num_stages; where an instruction is missing on this architecture, take another path there"
        )
        message = f"{function.__name__} does not compile to machine code for {where}"
        severity = Severity.ERROR if combination.reach.name == "GIVEN" else Severity.WARNING
        return [Finding(code="KN010", severity=severity, message=message, place=place, cause=cause, fix=fix, details=details)], None
    allowed = limits(target)
    details += (("usage", usage.written),)
    if usage.shared_bytes > allowed.shared_bytes:
        cause = f"one block needs {usage.shared_bytes:,} bytes of shared memory, {where} allows {allowed.shared_bytes:,}: OutOfResources"
        severity = Severity.ERROR if combination.reach.name == "GIVEN" else Severity.NOTE
        message = f"{function.__name__} needs more shared memory than {where} has"
        return [
            Finding(
                code="KN011",
                severity=severity,
                message=message,
                place=place,
                cause=cause,
                fix="smaller blocks or fewer num_stages",
                details=details,
            )
        ], usage
    if usage.spills:
        cause = f"{usage.spills} values a thread do not fit in {usage.registers} registers and go to memory and back"
        severity = Severity.WARNING if usage.spills > MANY_SPILLS and combination.reach.name == "GIVEN" else Severity.NOTE
        fix = "smaller blocks, more warps, or narrow fp32 values earlier"
        return [
            Finding(
                code="KN012",
                severity=severity,
                message=f"{function.__name__} spills registers on {where}",
                place=place,
                cause=cause,
                fix=fix,
                details=details,
            )
        ], usage
    return [], usage


def machine_code(function: Any, combination: Any, target: Any) -> Usage:
    """Compiles all the way and reads what the program takes; Triton's own cache makes a second time quick."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(function, dict(combination.types), dict(combination.constexprs), dict(combination.attributes))
    compiled = triton.compile(source, target=target, options=dict(combination.options))
    shared = int(getattr(compiled.metadata, "shared", 0))
    if target.backend == "cuda":
        registers, spills = _nvidia_usage(compiled.asm.get("cubin"))
    else:
        registers, spills = _amd_usage(str(compiled.asm.get("amdgcn", "")))
    return Usage(registers, spills, shared)


def _nvidia_usage(cubin: bytes | None) -> tuple[int | None, int | None]:
    tool = _cuobjdump()
    if cubin is None or tool is None:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    # Triton's kernels keep nothing on the stack but what did not fit in registers
    return (int(registers[1]) if registers else None), (int(stack[1]) // 4 if stack else None)


def _cuobjdump() -> str | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.is_file() else None


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers, spills = re.search(r"\.vgpr_count:\s*(\d+)", assembly), re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)
