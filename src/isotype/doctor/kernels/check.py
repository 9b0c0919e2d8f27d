"""`check`: a kernel's dtype matrix through Triton's front end, and what fails in it as findings. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Place, Severity, listed
from .compiled import static_faults
from .failures import diagnose
from .observe import Observation, observe
from .provenance import Fault
from .signature import (
    DEFAULT,
    Combination,
    Reach,
    distinct,
    float_pointer_matrix,
    parse_target,
    place_of,
    require_triton,
    scalar_variations,
)

Signatures = Mapping[str, Mapping[str, str]] | Sequence[Mapping[str, str]]
_SEVERITY = {Reach.GIVEN: Severity.ERROR, Reach.MIXED: Severity.WARNING, Reach.INFERRED: Severity.WARNING, Reach.LATENT: Severity.NOTE}


@dataclass
class Seen:
    """One fault with every combination that shows it."""

    fault: Fault
    observations: list[Observation] = field(default_factory=list)

    @property
    def reach(self) -> Reach:
        return max(o.combination.reach for o in self.observations)


@dataclass
class Result:
    """What checking one kernel showed."""

    findings: list[Finding]
    compiled: int  # combinations tried, over all targets
    failed: int
    observations: list[Observation] = field(default_factory=list)
    usages: list[str] = field(default_factory=list)  # with `binary`: a line for each program made


def check(
    kernel: Any,
    signatures: Signatures | None = None,
    constexprs: Mapping[str, Any] | None = None,
    targets: Sequence[str | int] = (DEFAULT,),
    *,
    binary: bool = False,
    extend: bool = True,
) -> list[Finding]:
    """Compiles `kernel` for its dtype matrix and says what fails, worst first in `findings`' severities.

    kernel      a `@triton.jit` function, autotuned or with heuristics or not
    signatures  label -> {parameter: "*bf16", "i32", "fp32"}, or a list of them; inferred from the source when left out
    constexprs  values of the `tl.constexpr` parameters; guessed where left out (a finding's details say what was used)
    targets     "sm_80", "sm_90", "sm_100", "gfx942"
    binary      also to machine code: registers, spills and shared memory (seconds a target)
    extend      also vary one pointer, one integer, one scalar at a time; what fails only there is a note
    Raises      UsageError when `kernel` is none, a signature does not fit it, or Triton is missing or unknown
    """
    return check_kernel(kernel, signatures, constexprs, targets, binary=binary, extend=extend).findings


def check_kernel(
    kernel: Any,
    signatures: Signatures | None = None,
    constexprs: Mapping[str, Any] | None = None,
    targets: Sequence[str | int] = (DEFAULT,),
    *,
    binary: bool = False,
    extend: bool = True,
) -> Result:
    """`check` with counts and observations."""
    from .infer import inferred_combinations
    from .signature import unwrap

    require_triton()
    whole = unwrap(kernel)
    if signatures is None:
        bases = inferred_combinations(whole, constexprs or {})
    else:
        named = signatures if isinstance(signatures, Mapping) else {f"signature {i}": s for i, s in enumerate(signatures)}
        values = whole.with_defaults(constexprs or {})
        config = whole.configs[0]
        bases = [replace(given(whole.function, label, types, values), options=config.options) for label, types in named.items()]
    return check_combinations(whole.function, bases, targets, binary=binary, extend=extend)


def given(function: Any, label: str, types: Mapping[str, str], constexprs: Mapping[str, Any]) -> Combination:
    """One entry of an author's matrix.

    Raises  UsageError naming parameters that the kernel has not, or that were forgotten.
    """
    names = list(function.arg_names)
    unknown = [n for n in [*types, *constexprs] if n not in names]
    if unknown:
        raise UsageError(
            f"{function.__name__}: signature {label!r} names {', '.join(unknown)}, which the kernel has not (it has {', '.join(names)})"
        )
    values = {n: v for n, v in constexprs.items() if n not in types or types[n] == "constexpr"}
    full = {n: "constexpr" if n in values else types.get(n) for n in names}
    missing = [n for n, word in full.items() if word is None or (word == "constexpr" and n not in values)]
    if missing:
        raise UsageError(f"{function.__name__}: signature {label!r} says nothing of {', '.join(missing)}")
    return Combination(label, full, values)


def extended(function: Any, bases: Sequence[Combination]) -> list[Combination]:
    """The author's combinations, then one pointer, one integer and one scalar different at a time."""
    names = list(function.arg_names)
    may = {p.name for p in function.params if not p.do_not_specialize and not p.is_constexpr}
    combinations = list(bases)
    # one base each of the shapes of signature seen is enough: faults of one dtype do not depend on another launch's constexprs
    for base in _representatives(bases):
        combinations += float_pointer_matrix(base, reach_alike=Reach.LATENT)
    for base in _representatives(bases)[:1]:
        alike = next((c for c in combinations if c.label == "bf16"), base)
        combinations += scalar_variations(replace(alike, label="bf16" if alike is not base else base.label), names, may_specialize=may)
    return distinct(combinations)


def _representatives(bases: Sequence[Combination]) -> list[Combination]:
    """Bases that differ in which parameters are pointers (an optional tensor given or None), not only in dtypes."""
    kinds: dict[tuple, Combination] = {}
    for base in bases:
        kinds.setdefault(tuple(str(word)[:1] == "*" for word in base.types.values()), base)
    return list(kinds.values())[:4]


def check_combinations(
    function: Any, bases: Sequence[Combination], targets: Sequence[str | int] = (DEFAULT,), *, binary: bool = False, extend: bool = True
) -> Result:
    """Every combination for the first target; those a caller can produce for the others too."""
    parsed = [parse_target(t) for t in targets]
    if not parsed:
        raise UsageError("no target architecture: name at least one, such as sm_90")
    combinations = extended(function, bases) if extend else distinct(list(bases))
    observations = [observe(function, c, parsed[0]) for c in combinations]
    for target in parsed[1:]:
        observations += [observe(function, c, target) for c in combinations if c.reach > Reach.LATENT]
    findings = as_findings(function, observations)
    usages: list[str] = []
    if binary:
        from .compiled import binary_findings

        more, usages = binary_findings(function, [o for o in observations if not o.failed and o.combination.reach > Reach.LATENT], parsed)
        findings += more
    return Result(findings, len(observations), sum(o.failed for o in observations), observations, usages)


def as_findings(function: Any, observations: Sequence[Observation]) -> list[Finding]:
    """One finding a fault, over all the combinations and targets that show it."""
    seen: dict[tuple, Seen] = {}
    for observation in observations:
        for fault in _faults(function, observation):
            known = seen.setdefault((fault.code, fault.file, fault.line), Seen(fault))
            if known.observations and observation.combination.reach > known.reach:
                known.fault = fault
            known.observations.append(observation)
    return [_finding(function, one, observations) for one in seen.values() if not _is_ours(one, observations)]


def _faults(function: Any, observation: Observation) -> Iterable[Fault]:
    if observation.failed:
        return [diagnose(function.__name__, *place_of(function), observation)]
    if observation.combination.reach == Reach.LATENT:
        return []
    return static_faults(function.__name__, observation)


def _is_ours(one: Seen, observations: Sequence[Observation]) -> bool:
    """Whether a failure is due to guessed arguments and not to the kernel: no dtype error, in a combination that no caller gave."""
    return one.fault.severity is None and not one.fault.is_dtype and one.reach <= Reach.INFERRED and _some_compile(observations)


def _some_compile(observations: Sequence[Observation]) -> bool:
    return any(not o.failed for o in observations)


def _severity(one: Seen, observations: Sequence[Observation]) -> Severity:
    if one.fault.severity is not None:
        return one.fault.severity if one.reach > Reach.LATENT else Severity.NOTE
    if one.reach == Reach.INFERRED:
        # if no guess compiles, the guesses are probably wrong: a kernel that was never run is less likely
        inferred = [o for o in observations if o.combination.reach == Reach.INFERRED]
        if not one.fault.is_dtype or all(o.failed for o in inferred):
            return Severity.NOTE
        if one.fault.statistic:  # running sums and maxima of rows are fp32 buffers by design (trl.kernels keeps them across launches)
            return Severity.NOTE
        if one.fault.code == "KN003" and _one_pointer_in_fp32_compiles(observations):
            return Severity.NOTE
    return _SEVERITY[one.reach]


def _one_pointer_in_fp32_compiles(observations: Sequence[Observation]) -> bool:
    """Whether one pointer in fp32 beside the others in bf16 cures it.

    Operands of two pointers need not share a dtype: gates, decays and intermediate gradients are fp32 by design in many libraries
    (`chunk_gla_bwd_kernel_intra` of flash-linear-attention, whose dA is), so that "all alike" is our guess and not a caller's choice.
    """
    mixed = [o for o in observations if o.combination.label.startswith("bf16, ") and o.combination.label.endswith(" fp32")]
    return any(not o.failed for o in mixed)


def _finding(function: Any, one: Seen, observations: Sequence[Observation]) -> Finding:
    fault, failing = one.fault, one.observations
    failing = [o for o in failing if o.combination.reach == one.reach] + [o for o in failing if o.combination.reach != one.reach]
    labels = list(dict.fromkeys(o.combination.label for o in failing))
    peers = [o for o in observations if not o.failed and o.combination.reach >= min(one.reach, Reach.INFERRED)]
    passing = [x for x in dict.fromkeys(o.combination.label for o in peers) if x not in labels]
    verb = "fails for" if failing[0].failed else "seen with"
    details = [("kernel", fault.kernel), ("variable", fault.variable), ("dtypes", " and ".join(fault.dtypes)), *fault.facts]
    reachable = list(dict.fromkeys(o.combination.label for o in failing if o.combination.reach > Reach.LATENT)) or labels
    varied = f" (and {len(labels) - len(reachable)} variations)" if len(labels) > len(reachable) else ""
    details += [(verb, listed(reachable) + varied), ("compiles for", listed(passing) if failing[0].failed else "")]
    details += [("signature", failing[0].combination.written), ("targets", ", ".join(dict.fromkeys(o.target for o in failing)))]
    details += [("reach", one.reach.words)]
    if failing[0].failed:
        details.append(("triton", failing[0].message))
    return Finding(
        code=fault.code,
        severity=_severity(one, observations),
        message=fault.message,
        place=Place(file=fault.file, line=fault.line, symbol=fault.kernel),
        cause=fault.cause,
        declared=None,
        observed=None,
        fix=fault.fix,
        details=tuple((label, value) for label, value in details if value),
    )
