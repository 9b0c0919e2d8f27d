"""`check`: a kernel's dtype matrix through Triton's front end, and what fails in it as findings.
Needs no GPU.

With `binary` kernels are compiled to machine code as well: registers, spills and shared memory
(KN010).
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Place, Severity, listed
from .failures import diagnose, low_precision_sums
from .infer import inferred_combinations
from .observe import Fault, Observation, observe
from .signature import (
    DEFAULT,
    Combination,
    Reach,
    Unwrapped,
    distinct,
    is_float_pointer,
    parse_target,
    place_of,
    require_triton,
    shared_bytes,
    target_name,
    unwrap,
)


@dataclass
class Seen:
    """One fault with every combination that shows it, the most reachable first."""

    fault: Fault
    observations: list[Observation]

    @property
    def reach(self) -> Reach:
        return self.observations[0].combination.reach


@dataclass
class Report:
    """What was checked: findings, which kernels, how many compilations, and what a reader should
    know about the rest.

    usages    with `binary`: a line for each program made
    launches  of a wrapper; refused: label -> why the wrapper itself refuses that combination
    """

    findings: list[Finding] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    compiled: int = 0
    failed: int = 0
    usages: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    launches: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        self.findings += [f for f in other.findings if f not in self.findings]
        self.kernels += [k for k in other.kernels if k not in self.kernels]
        self.compiled += other.compiled
        self.failed += other.failed
        self.usages += other.usages
        self.remarks += [
            f"{label}: refused by the function itself: {why}"
            for label, why in other.refused.items()
        ] + other.remarks


def check(
    kernel: Any,
    signatures: Mapping[str, Mapping[str, str]] | None = None,
    constexprs: Mapping[str, Any] | None = None,
    targets: Sequence[str | int] = (DEFAULT,),
    *,
    binary: bool = False,
) -> Report:
    """Compiles `kernel` for its dtype matrix and says what fails.

    kernel      a `@triton.jit` function, autotuned or with heuristics or not
    signatures  label -> {parameter: "*bf16", "i32", "fp32"}; inferred from the source when left out
    constexprs  values of the `tl.constexpr` parameters; guessed where left out (a finding's details
                say what was used)
    targets     "sm_80", "sm_90", "sm_100", "gfx942"
    binary      also to machine code: registers, spills and shared memory (seconds a target)
    Raises      UsageError when `kernel` is none, a signature does not fit it, or Triton is missing
                or unknown
    """
    require_triton()
    whole = unwrap(kernel)
    if signatures is None:
        bases = inferred_combinations(whole, constexprs or {})
    else:
        bases = [
            _given(whole, label, types, whole.with_defaults(constexprs or {}))
            for label, types in signatures.items()
        ]
    return check_combinations(whole.function, bases, targets, binary=binary)


def _given(
    whole: Unwrapped, label: str, types: Mapping[str, str], constexprs: Mapping[str, Any]
) -> Combination:
    """One entry of an author's matrix.

    Raises  UsageError naming parameters that the kernel has not, or that were forgotten.
    """
    function, names = whole.function, list(whole.function.arg_names)
    unknown = [n for n in [*types, *constexprs] if n not in names]
    if unknown:
        raise UsageError(
            f"{function.__name__}: signature {label!r} names {', '.join(unknown)}, which the kernel"
            f" has not (it has {', '.join(names)})"
        )
    values = {n: v for n, v in constexprs.items() if n not in types or types[n] == "constexpr"}
    full = {n: "constexpr" if n in values else types.get(n) for n in names}
    missing = [
        n for n, word in full.items() if word is None or (word == "constexpr" and n not in values)
    ]
    if missing:
        raise UsageError(
            f"{function.__name__}: signature {label!r} says nothing of {', '.join(missing)}"
        )
    return Combination(label, full, values, options=whole.configs[0].options)


def check_combinations(
    function: Any,
    bases: Sequence[Combination],
    targets: Sequence[str | int] = (DEFAULT,),
    *,
    binary: bool = False,
) -> Report:
    """Every combination for every target."""
    parsed, combinations = [parse_target(t) for t in targets], distinct(bases)
    if not parsed:
        raise UsageError("no target architecture: name at least one, such as sm_90")
    observations = [observe(function, c, target) for target in parsed for c in combinations]
    findings, usages = as_findings(function, observations), list[str]()
    if binary:
        more, usages = binary_findings(function, [o for o in observations if not o.failed], parsed)
        findings += more
    return Report(
        findings,
        [function.__name__],
        len(observations),
        sum(o.failed for o in observations),
        usages,
    )


def as_findings(function: Any, observations: Sequence[Observation]) -> list[Finding]:
    """One finding a fault, over all the combinations and targets that show it."""
    seen: dict[tuple, Seen] = {}
    for one in sorted(observations, key=lambda o: -o.combination.reach):
        name = function.__name__
        for fault in (
            [diagnose(name, *place_of(function), one)]
            if one.failed
            else low_precision_sums(name, one)
        ):
            seen.setdefault(
                (fault.code, fault.file, fault.line), Seen(fault, [])
            ).observations.append(one)
    return [
        _finding(function, one, observations)
        for one in seen.values()
        if not _is_ours(one, observations)
    ]


def _is_ours(one: Seen, observations: Sequence[Observation]) -> bool:
    """Whether a failure is due to guessed arguments and not to the kernel: no dtype error, in a
    combination that no caller gave.
    """
    some_compile = any(not o.failed for o in observations)
    return (
        one.fault.severity is None
        and not one.fault.is_dtype
        and one.reach == Reach.INFERRED
        and some_compile
    )


def _severity(function: Any, one: Seen, observations: Sequence[Observation]) -> Severity:
    if one.fault.severity is not None:
        return one.fault.severity
    if one.reach == Reach.INFERRED:
        # if no guess compiles, the guesses are probably wrong: a kernel that was never run is less
        # likely. Running sums and maxima of rows are fp32 buffers by design (trl.kernels keeps them
        # across launches)
        if not one.fault.is_dtype or one.fault.statistic or all(o.failed for o in observations):
            return Severity.NOTE
        if one.fault.code == "KN003" and _one_pointer_in_fp32_compiles(function, one):
            return Severity.NOTE
    return Severity.ERROR if one.reach == Reach.GIVEN else Severity.WARNING


def _one_pointer_in_fp32_compiles(function: Any, one: Seen) -> bool:
    """Whether one pointer in fp32 beside the others in bf16 cures it.

    Operands of two pointers need not share a dtype: gates, decays and intermediate gradients are
    fp32 by design in many libraries (`chunk_gla_bwd_kernel_intra` of flash-linear-attention, whose
    dA is), so that "all alike" is our guess and not a caller's choice.
    """
    seen = one.observations[0]
    types = {
        name: "*bf16" if is_float_pointer(word) else word
        for name, word in seen.combination.types.items()
    }
    mixed = (
        replace(seen.combination, types={**types, name: "*fp32"})
        for name, word in types.items()
        if word == "*bf16"
    )
    return any(not observe(function, each, parse_target(seen.target)).failed for each in mixed)


def _finding(function: Any, one: Seen, observations: Sequence[Observation]) -> Finding:
    fault, failing = one.fault, one.observations
    labels = list(dict.fromkeys(o.combination.label for o in failing))
    passing = [
        x
        for x in dict.fromkeys(o.combination.label for o in observations if not o.failed)
        if x not in labels
    ]
    details = [
        ("kernel", fault.kernel),
        ("variable", fault.variable),
        ("dtypes", " and ".join(fault.dtypes)),
        *fault.facts,
    ]
    details += (
        [("fails for", listed(labels)), ("compiles for", listed(passing))]
        if failing[0].failed
        else [("seen with", listed(labels))]
    )
    details += [
        ("signature", failing[0].combination.written),
        ("targets", ", ".join(dict.fromkeys(o.target for o in failing))),
    ]
    details += [("reach", one.reach.words)]
    if failing[0].failed:
        details.append(("triton", failing[0].message))
    return Finding(
        code=fault.code,
        severity=_severity(function, one, observations),
        message=fault.message,
        place=Place(file=fault.file, line=fault.line, symbol=fault.kernel),
        cause=fault.cause,
        fix=fault.fix,
        details=tuple((label, value) for label, value in details if value),
    )


MANY_SPILLS = 64  # 4-byte values a thread; fewer cost nothing one can measure


@dataclass(frozen=True)
class Usage:
    """The resources of one compiled program. None where the tool that reports them is not
    installed.
    """

    registers: int | None
    spills: int | None
    shared_bytes: int

    @property
    def written(self) -> str:
        known = [("registers", self.registers), ("spilled values", self.spills)]
        return ", ".join(
            [f"{n} {label}" for label, n in known if n is not None]
            + [f"{self.shared_bytes:,} bytes of shared memory"]
        )


def binary_findings(
    function: Any, observations: Sequence[Observation], targets: Sequence[Any]
) -> tuple[list[Finding], list[str]]:
    """One signature a dtype and target: the first combination of each. Returns findings, and a line
    of usage for each program made.
    """
    findings: list[Finding] = []
    usages: list[str] = []
    chosen: dict[tuple[str, ...], Observation] = {}
    for one in observations:
        words = sorted({str(w) for w in one.combination.types.values() if str(w).startswith("*")})
        chosen.setdefault((one.target, *words), one)
    for one in chosen.values():
        found, usage = _compiled(
            function, one, next(target for target in targets if target_name(target) == one.target)
        )
        findings += found
        if usage:
            usages.append(
                f"{function.__name__} {one.target} {one.combination.label}: {usage.written}"
            )
    return findings, usages


def _compiled(
    function: Any, observation: Observation, target: Any
) -> tuple[list[Finding], Usage | None]:
    combination, where = observation.combination, target_name(target)
    usage, allowed, given = None, shared_bytes(target), combination.reach == Reach.GIVEN
    try:
        # Triton prints a whole PTX file when ptxas refuses it
        with contextlib.redirect_stdout(io.StringIO()):
            usage = machine_code(function, combination, target)
    except Exception as error:
        severity = Severity.ERROR if given else Severity.WARNING
        text = " ".join(str(error).split())[:400]
        what, why = (
            "does not compile to machine code for",
            f"a later stage than the front end refuses it: {type(error).__name__}: {text}",
        )
        fix = (
            "other block sizes, num_warps and num_stages; where an instruction is missing on this"
            " architecture, another path there"
        )
    else:
        if usage.shared_bytes > allowed:
            severity = Severity.ERROR if given else Severity.NOTE
            what, why = (
                "needs more shared memory than there is on",
                f"one block needs {usage.shared_bytes:,} bytes of {allowed:,}",
            )
            fix = "smaller blocks or fewer num_stages"
        elif usage.spills:
            severity = Severity.WARNING if usage.spills > MANY_SPILLS and given else Severity.NOTE
            what, why = (
                "spills registers on",
                f"{usage.spills} values a thread do not fit in {usage.registers} registers",
            )
            fix = "smaller blocks, more warps, or narrow fp32 values earlier"
        else:
            return [], usage
    file, line = place_of(function)
    details = [
        ("kernel", function.__name__),
        ("signature", combination.written),
        ("target", where),
        ("reach", combination.reach.words),
    ]
    found = Finding(
        code="KN010",
        severity=severity,
        message=f"{function.__name__} {what} {where}",
        place=Place(file=file, line=line, symbol=function.__name__),
        cause=why,
        fix=fix,
        details=(*details, *((("usage", usage.written),) if usage is not None else ())),
    )
    return [found], usage


def machine_code(function: Any, combination: Any, target: Any) -> Usage:
    """Compiles all the way and reads what the program takes; Triton's own cache makes a second time
    quick.
    """
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(
        function,
        dict(combination.types),
        dict(combination.constexprs),
        dict(combination.attributes),
    )
    compiled = triton.compile(source, target=target, options=dict(combination.options))
    shared = int(getattr(compiled.metadata, "shared", 0))
    if target.backend == "cuda":
        registers, spills = _nvidia_usage(compiled.asm.get("cubin"))
    else:
        registers, spills = _amd_usage(str(compiled.asm.get("amdgcn", "")))
    return Usage(registers, spills, shared)


def _nvidia_usage(cubin: bytes | None) -> tuple[int | None, int | None]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.is_file():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    # Triton's kernels keep nothing on the stack but what did not fit in registers
    return (int(registers[1]) if registers else None), (int(stack[1]) // 4 if stack else None)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers, spills = (
        re.search(r"\.vgpr_count:\s*(\d+)", assembly),
        re.search(r"\.vgpr_spill_count:\s*(\d+)", assembly),
    )
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)
