"""`check` compiles a kernel with Triton's front end for many combinations of argument dtypes, and
reports the faults that it finds. It needs no GPU.

With `binary`, kernels are also compiled to machine code, and the registers, spills and shared
memory that they use are reported (KN010).
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Place, Severity, join_names
from .compile_inputs import (
    DEFAULT_TARGET,
    Combination,
    Reach,
    UnwrappedKernel,
    is_float_pointer,
    locate_kernel,
    parse_target,
    remove_duplicates,
    require_triton,
    shared_bytes,
    target_name,
    unwrap_kernel,
)
from .failures import diagnose, find_low_precision_sums
from .infer import infer_combinations
from .observe import Fault, Observation, observe
from .offsets import LaunchShape, find_offset_overflows
from .python_floats import add_fp64_combinations, drop_repeated_failures, find_fp64_blocks

# the types of the pointers of kernels that compile with no pointers to floats
INTEGER_TYPES = ("i32", "i8")
ARGUMENTS_UNKNOWN = "not checked, because its arguments cannot be inferred from its source"
EVERY_CALL = "every call: the kernel does not compile, whatever its arguments are"


@dataclass
class FaultGroup:
    """One fault, with all combinations of argument types in which it occurs. The combination that
    callers are most likely to use comes first.
    """

    fault: Fault
    observations: list[Observation]

    @property
    def reach(self) -> Reach:
        return self.observations[0].combination.reach


@dataclass
class Report:
    """The result of a check.

    kernels         the names of the checked kernels
    compiled        the number of compilations
    failed          the number of compilations that failed
    remarks         other messages about the check
    usages          with `binary`, a line about the resources of each compiled program
    launches        the number of launches that a wrapper made
    refused         label of a combination -> the error that the wrapper raised for it
    is_interrupted  whether Ctrl-C ended the check before all kernels were checked
    """

    findings: list[Finding] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    compiled: int = 0
    failed: int = 0
    usages: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    launches: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    is_interrupted: bool = False

    def add(self, report: Report) -> None:
        self.findings += [finding for finding in report.findings if finding not in self.findings]
        self.kernels += [kernel for kernel in report.kernels if kernel not in self.kernels]
        self.compiled += report.compiled
        self.failed += report.failed
        self.usages += report.usages
        self.launches += report.launches
        self.remarks += [
            f"{label}: refused by the function itself: {reason}"
            for label, reason in report.refused.items()
        ] + report.remarks


def check(
    kernel: Any,
    signatures: Mapping[str, Mapping[str, str]] | None = None,
    constexprs: Mapping[str, Any] | None = None,
    targets: Sequence[str | int] = (DEFAULT_TARGET,),
    *,
    binary: bool = False,
) -> Report:
    """Compiles `kernel` for many combinations of argument dtypes and reports the faults.

    kernel      a `@triton.jit` function, with or without autotuning and heuristics
    signatures  label -> {parameter: "*bf16", "i32", "fp32"}; by default they are inferred from the
                source
    constexprs  values of the `tl.constexpr` parameters; missing values are guessed, and the report
                shows the guessed values
    targets     "sm_80", "sm_90", "sm_100", "gfx942"
    binary      whether to compile to machine code too, which reports registers, spills and shared
                memory and takes seconds per target
    Raises      UsageError if `kernel` is not a kernel, if a signature does not fit it, or if Triton
                is missing or of an untested version
    """
    require_triton()
    unwrapped = unwrap_kernel(kernel)
    if signatures is None:
        return _check_inferred(unwrapped, constexprs or {}, targets, binary)
    combinations = [
        _explicit_combination(unwrapped, label, types, unwrapped.with_defaults(constexprs or {}))
        for label, types in signatures.items()
    ]
    return check_combinations(unwrapped.function, combinations, targets, binary=binary)


def _check_inferred(
    unwrapped: UnwrappedKernel,
    constexprs: Mapping[str, Any],
    targets: Sequence[str | int],
    binary: bool,
) -> Report:
    """Checks a kernel with the argument types that are inferred from its source. If it compiles
    with no float pointers, it is checked with pointers to integers, such as the prefix sums in
    Liger-Kernel's MoE router.
    """
    parsed_targets = [parse_target(target) for target in targets]
    combinations = infer_combinations(unwrapped, constexprs)
    observations = observe_combinations(unwrapped.function, combinations, parsed_targets)
    if all(observation.failed for observation in observations):
        integers = infer_combinations(unwrapped, constexprs, INTEGER_TYPES)
        observations_of_integers = [
            observation
            for observation in observe_combinations(unwrapped.function, integers, parsed_targets)
            if not observation.failed
        ]
        observations = observations_of_integers or observations
    return _build_report(unwrapped.function, observations, parsed_targets, binary)


def _explicit_combination(
    unwrapped: UnwrappedKernel, label: str, types: Mapping[str, str], constexprs: Mapping[str, Any]
) -> Combination:
    """Returns the combination of argument types that one entry in `signatures` describes.

    Raises  UsageError with the names of unknown or missing parameters
    """
    function, names = unwrapped.function, list(unwrapped.function.arg_names)
    unknown = [name for name in [*types, *constexprs] if name not in names]
    if unknown:
        raise UsageError(
            f"{function.__name__}: signature {label!r} names {', '.join(unknown)}, which the kernel"
            f" has not (it has {', '.join(names)})"
        )
    values = {
        name: value
        for name, value in constexprs.items()
        if name not in types or types[name] == "constexpr"
    }
    all_types = {name: "constexpr" if name in values else types.get(name) for name in names}
    missing = [
        name
        for name, type_name in all_types.items()
        if type_name is None or (type_name == "constexpr" and name not in values)
    ]
    if missing:
        raise UsageError(
            f"{function.__name__}: signature {label!r} says nothing of {', '.join(missing)}"
        )
    return Combination(label, all_types, values, options=unwrapped.configs[0].options)


def check_combinations(
    function: Any,
    combinations: Sequence[Combination],
    targets: Sequence[str | int] = (DEFAULT_TARGET,),
    *,
    binary: bool = False,
) -> Report:
    """Checks every combination for every target."""
    parsed_targets = [parse_target(target) for target in targets]
    observations = observe_combinations(function, combinations, parsed_targets)
    return _build_report(function, observations, parsed_targets, binary)


def observe_combinations(
    function: Any, combinations: Sequence[Combination], targets: Sequence[Any]
) -> list[Observation]:
    """Compiles every combination, also with fp64 scalars, for every target.

    Raises  UsageError if there is no target
    """
    if not targets:
        raise UsageError("no target architecture: name at least one, such as sm_90")
    distinct_combinations = remove_duplicates(add_fp64_combinations(combinations))
    return [
        observe(function, combination, target)
        for target in targets
        for combination in distinct_combinations
    ]


def _build_report(
    function: Any, observations: Sequence[Observation], targets: Sequence[Any], binary: bool
) -> Report:
    findings = build_findings(function, observations)
    usages: list[str] = []
    if binary:
        compiled = [observation for observation in observations if not observation.failed]
        binary_findings, usages = check_machine_code(function, compiled, targets)
        findings += binary_findings
    return Report(
        findings,
        [function.__name__],
        len(observations),
        sum(observation.failed for observation in observations),
        usages,
        list(_describe_unknown_arguments(function, observations)),
    )


def build_findings(function: Any, observations: Sequence[Observation]) -> list[Finding]:
    """Returns one finding for each fault. The finding covers all combinations and targets in which
    the fault occurs.
    """
    groups: dict[tuple, FaultGroup] = {}
    observations = drop_repeated_failures(observations)
    for observation in sorted(observations, key=lambda o: -o.combination.reach):
        name = function.__name__
        if observation.failed:
            faults = [diagnose(name, *locate_kernel(function), observation)]
        else:
            faults = find_low_precision_sums(name, observation)
            faults += find_fp64_blocks(name, observation)
        for fault in faults:
            key = (fault.code, fault.file, fault.line)
            group = groups.setdefault(key, FaultGroup(fault, []))
            group.observations.append(observation)
    return [
        _build_finding(function, group, observations)
        for group in groups.values()
        if not _is_due_to_guess(group)
    ]


def build_offset_findings(
    function: Any, shape: LaunchShape, observation: Observation
) -> list[Finding]:
    """Returns one finding for each offset that does not fit in int32 at this launch."""
    parameters = [
        name
        for name, type_name in observation.combination.types.items()
        if type_name != "constexpr"
    ]
    faults = find_offset_overflows(function.__name__, parameters, shape, observation)
    groups = [FaultGroup(fault, [observation]) for fault in faults]
    return [_build_finding(function, group, [observation]) for group in groups]


def _is_due_to_guess(group: FaultGroup) -> bool:
    """True if a failure was probably caused by the arguments that this module guessed. This is so
    if the combination was inferred from the source, and the failure is no dtype error and depends
    on the arguments.
    """
    return (
        group.fault.severity is None
        and not group.fault.is_dtype
        and not group.fault.is_independent
        and group.reach == Reach.INFERRED
    )


def _describe_unknown_arguments(
    function: Any, observations: Sequence[Observation]
) -> Iterator[str]:
    """Yields a remark if the kernel was not checked, because it compiles with no arguments that
    this module guesses.
    """
    if not all(observation.failed for observation in observations):
        return
    fault = diagnose(function.__name__, *locate_kernel(function), observations[0])
    if _is_due_to_guess(FaultGroup(fault, [observations[0]])):
        yield (
            f"{function.__name__}: {ARGUMENTS_UNKNOWN}"
            f" ({fault.file}:{fault.line}: {observations[0].message[:120]})"
        )


def _decide_severity(
    function: Any, group: FaultGroup, observations: Sequence[Observation]
) -> Severity:
    if group.fault.severity is not None:
        return group.fault.severity
    if group.reach == Reach.INFERRED:
        all_fail = all(observation.failed for observation in observations)
        if group.fault.is_independent:
            return Severity.WARNING if all_fail else Severity.NOTE
        # If no guess compiles, the guesses are probably wrong. It is less likely that the kernel
        # never worked. Running sums and maxima of rows are fp32 buffers by design (trl.kernels
        # keeps them across launches).
        if not group.fault.is_dtype or group.fault.is_row_statistic or all_fail:
            return Severity.NOTE
        if group.fault.code == "KN003" and _one_pointer_in_fp32_compiles(function, group):
            return Severity.NOTE
    return Severity.ERROR if group.reach == Reach.CONFIRMED else Severity.WARNING


def _one_pointer_in_fp32_compiles(function: Any, group: FaultGroup) -> bool:
    """True if the kernel compiles with one pointer in fp32 and all other pointers in bf16.

    In many libraries, the pointers of a kernel have different dtypes: gates, decays and
    intermediate gradients are fp32 by design, for example dA of `chunk_gla_bwd_kernel_intra` in
    flash-linear-attention. This module only guesses that all pointers have the same dtype.
    """
    observation = group.observations[0]
    types = {
        name: "*bf16" if is_float_pointer(type_name) else type_name
        for name, type_name in observation.combination.types.items()
    }
    mixed_combinations = (
        replace(observation.combination, types={**types, name: "*fp32"})
        for name, type_name in types.items()
        if type_name == "*bf16"
    )
    return any(
        not observe(function, combination, parse_target(observation.target)).failed
        for combination in mixed_combinations
    )


def _build_finding(
    function: Any, group: FaultGroup, observations: Sequence[Observation]
) -> Finding:
    fault, failing = group.fault, group.observations
    labels = list(dict.fromkeys(observation.combination.label for observation in failing))
    if all(
        observation.combination.counterpart and not observation.failed for observation in failing
    ):
        labels = list(dict.fromkeys(observation.combination.counterpart for observation in failing))
    passing = [
        label
        for label in dict.fromkeys(
            observation.combination.label for observation in observations if not observation.failed
        )
        if label not in labels
    ]
    details = [
        ("kernel", fault.kernel),
        ("variable", fault.variable),
        ("dtypes", " and ".join(fault.dtypes)),
        *fault.facts,
    ]
    if failing[0].failed:
        details.append(("fails for", join_names(labels)))
        details.append(("compiles for", join_names(passing)))
    else:
        details.append(("seen with", join_names(labels)))
    details += [
        ("signature", failing[0].combination.type_summary),
        ("targets", ", ".join(dict.fromkeys(observation.target for observation in failing))),
    ]
    if fault.is_independent and all(observation.failed for observation in observations):
        details.append(("reach", EVERY_CALL))
    else:
        details.append(("reach", group.reach.description))
    if failing[0].failed:
        details.append(("triton", failing[0].message))
    return Finding(
        code=fault.code,
        severity=_decide_severity(function, group, observations),
        message=fault.message,
        place=Place(file=fault.file, line=fault.line, symbol=fault.kernel),
        cause=fault.cause,
        fix=fault.fix,
        details=tuple((label, value) for label, value in details if value),
    )


MAX_SPILLS = 64  # 4-byte values per thread; fewer spills have no measurable cost


@dataclass(frozen=True)
class Usage:
    """The resources of one compiled kernel. A value is None if the tool that reports it is not
    installed.

    spills  the number of registers that are spilled to memory
    """

    registers: int | None
    spills: int | None
    shared_bytes: int

    @property
    def summary(self) -> str:
        figures = [("registers", self.registers), ("spilled values", self.spills)]
        return ", ".join(
            [f"{n} {label}" for label, n in figures if n is not None]
            + [f"{self.shared_bytes:,} bytes of shared memory"]
        )


def check_machine_code(
    function: Any, observations: Sequence[Observation], targets: Sequence[Any]
) -> tuple[list[Finding], list[str]]:
    """Compiles a kernel to machine code for each target. Of all combinations with the same pointer
    dtypes, only one is compiled. Returns the findings, and one line of text about the resources of
    each compiled program.
    """
    findings: list[Finding] = []
    usages: list[str] = []
    representatives: dict[tuple[str, ...], Observation] = {}
    for observation in observations:
        pointer_types = sorted(
            {
                str(type_name)
                for type_name in observation.combination.types.values()
                if str(type_name).startswith("*")
            }
        )
        representatives.setdefault((observation.target, *pointer_types), observation)
    for observation in representatives.values():
        program_findings, usage = _check_program(
            function,
            observation,
            next(target for target in targets if target_name(target) == observation.target),
        )
        findings += program_findings
        if usage:
            usages.append(
                f"{function.__name__} {observation.target} {observation.combination.label}: {usage.summary}"
            )
    return findings, usages


def _check_program(
    function: Any, observation: Observation, target: Any
) -> tuple[list[Finding], Usage | None]:
    combination, target_label = observation.combination, target_name(target)
    usage, shared_limit, is_confirmed = (
        None,
        shared_bytes(target),
        combination.reach == Reach.CONFIRMED,
    )
    try:
        # Triton prints the whole PTX file if ptxas refuses it
        with contextlib.redirect_stdout(io.StringIO()):
            usage = measure_usage(function, combination, target)
    except Exception as error:
        severity = Severity.ERROR if is_confirmed else Severity.WARNING
        text = " ".join(str(error).split())[:400]
        problem, cause = (
            "does not compile to machine code for",
            f"a later stage than the front end refuses it: {type(error).__name__}: {text}",
        )
        fix = (
            "other block sizes, num_warps and num_stages; where an instruction is missing on this"
            " architecture, another path there"
        )
    else:
        if usage.shared_bytes > shared_limit:
            severity = Severity.ERROR if is_confirmed else Severity.NOTE
            problem, cause = (
                "needs more shared memory than there is on",
                f"one block needs {usage.shared_bytes:,} bytes of {shared_limit:,}",
            )
            fix = "smaller blocks or fewer num_stages"
        elif usage.spills:
            severity = (
                Severity.WARNING if usage.spills > MAX_SPILLS and is_confirmed else Severity.NOTE
            )
            problem, cause = (
                "spills registers on",
                f"{usage.spills} values a thread do not fit in {usage.registers} registers",
            )
            fix = "smaller blocks, more warps, or narrow fp32 values earlier"
        else:
            return [], usage
    file, line = locate_kernel(function)
    details = [
        ("kernel", function.__name__),
        ("signature", combination.type_summary),
        ("target", target_label),
        ("reach", combination.reach.description),
    ]
    if usage is not None:
        details.append(("usage", usage.summary))
    finding = Finding(
        code="KN010",
        severity=severity,
        message=f"{function.__name__} {problem} {target_label}",
        place=Place(file=file, line=line, symbol=function.__name__),
        cause=cause,
        fix=fix,
        details=tuple(details),
    )
    return [finding], usage


def measure_usage(function: Any, combination: Any, target: Any) -> Usage:
    """Compiles a kernel to machine code, and returns the registers, spills and shared memory that
    it uses. A second call is fast because of Triton's cache.
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
    # the stack of a Triton kernel holds only spilled registers
    stack_bytes = _find_number(r"STACK:(\d+)", text)
    spills = None if stack_bytes is None else stack_bytes // 4
    return _find_number(r"REG:(\d+)", text), spills


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers = _find_number(r"\.vgpr_count:\s*(\d+)", assembly)
    spills = _find_number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return registers, spills


def _find_number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None
