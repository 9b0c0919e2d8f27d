"""Faults of what compiles: sums in low precision (KN020); with `binary`, what the machine code needs (registers, spills, shared memory).

The first reads the typed syntax tree of a combination that compiled, so `acc` is known to be bf16 rather than guessed to be.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...finding import Finding, Place, Severity
from .observe import Frame, Observation
from .provenance import LOW, Fault, assigns, call_name, names_in, source_text, variable_of
from .signature import limits, place_of, target_name

_SUMS = ("sum", "cumsum")


def static_faults(kernel: str, observation: Observation) -> Iterator[Fault]:
    """Faults of one combination that compiled; the same fault of several functions or combinations is merged by the caller."""
    for frame in observation.frames:
        if frame.in_triton or frame.tree is None:
            continue
        yield from _low_precision_sums(kernel, frame)


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
