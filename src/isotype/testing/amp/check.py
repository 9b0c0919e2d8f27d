"""`ampcheck`: a differentiable function under every dtype combination that a trainer produces, and
the report of what was found; and how the command line names such a function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...doctor.loading import (
    convert_import_errors,
    describe_exception,
    get_member,
    load_module,
    required_parameters,
)
from ...errors import UsageError
from ...finding import Finding, Severity, render_findings, sort_findings
from ...ops.contract import OpContract
from .attempt import BACKWARD, Fault, Outcome, attempt
from .locate import find_failure
from .numerics import Numerics, long_sum_faults, precision_faults, rounded_weight_faults
from .rules import (
    accepted_failure_reason,
    aliasing_faults,
    contract_faults,
    failure_finding,
    first_line,
    gradient_faults,
    output_faults,
)
from .samples import LOW, Sample, Setting, Subject, read_samples, settings


class ConformanceError(AssertionError):
    """The function breaks under mixed precision. `report` holds the findings; the message is the
    whole report.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("\n" + report.render())


@dataclass(frozen=True)
class Report:
    """The result of `ampcheck(..., raises=False)`.

    tried    combinations run
    refused  combinations that the function refuses, as plain PyTorch does: setting -> why
    skipped  what could not be looked at, and why
    """

    subject: str
    findings: tuple[Finding, ...]
    tried: int
    refused: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """No finding of severity warning or error."""
        return not self.at_least(Severity.WARNING)

    def at_least(self, severity: Severity) -> list[Finding]:
        return [f for f in self.findings if f.severity >= severity]

    def codes(self, severity: Severity = Severity.WARNING) -> list[str]:
        """Codes of the findings at or above `severity`, each once."""
        return sorted({f.code for f in self.at_least(severity)})

    def render(self) -> str:
        text = render_findings(self.findings, subject=self.subject)
        return (
            f"{text} ({self.tried} combinations"
            f" run{f', {len(self.refused)} refused' if self.refused else ''})"
        )


def merge_findings(groups: Sequence[tuple[tuple[object, ...], Finding, str]]) -> list[Finding]:
    """One finding for each fault, however many combinations show it.

    groups  (what makes two findings the same fault, the finding, the combination it was seen in)
    """
    worst: dict[tuple[object, ...], Finding] = {}
    settings_by_key: dict[tuple[object, ...], dict[str, None]] = {}
    for key, finding, setting in groups:
        if key not in worst or finding.severity > worst[key].severity:
            worst[key] = finding
        settings_by_key.setdefault(key, {})[setting] = None
    out = []
    for key, finding in worst.items():
        first = list(settings_by_key[key])[:3]
        remaining = len(settings_by_key[key]) - 3
        examples = "; ".join(first) + (f"; and {remaining} more" if remaining > 0 else "")
        out.append(replace(finding, details=(*finding.details, ("seen with", examples))))
    return out


def ampcheck(
    fn: Any,
    inputs: Any,
    *,
    reference: Any = None,
    params: Sequence[Any] = (),
    contract: OpContract | None = None,
    raises: bool = True,
    fail_on: Severity = Severity.WARNING,
) -> Report:
    """Gradcheck for mixed precision: runs `fn` under the dtype combinations that trainers produce,
    and reports what breaks, where and why.

    fn         an autograd.Function, an nn.Module, or any callable; on the device its inputs are on
    inputs     one call: a tensor, a tuple of arguments or a dict of keyword arguments; or a list of
               calls. Where no tensor requires a gradient, every floating one does
    reference  the same mathematics in plain PyTorch: judges numerics, output dtypes and which
               combinations must run. Without one, the truth is `fn` itself in fp64, and the
               yardstick is its own forward under autograd
    params     further arguments, after `inputs`, that a trainer keeps in another dtype (weights).
               Without them, and without a contract, tensors that do not share the first one's
               leading size count as weights
    contract   an OpContract: which arguments share a dtype, and what outputs and gradients must be
    raises     raise ConformanceError when there is a finding at or above `fail_on`
    ->         the Report
    Raises     ConformanceError (an AssertionError) with the whole report; UsageError when the
               function runs under no combination
    """
    subject = Subject(fn)
    reference_subject = Subject(reference) if reference is not None else None
    skipped = []
    if (
        reference_subject is not None
        and subject.module is not None
        and reference_subject.shares_parameters(subject.module)
    ):
        reference_subject = None
        skipped.append(_OWN_WEIGHTS)
    if contract:
        names = list(contract.inputs)
    else:
        names = subject.argument_names or (
            reference_subject.argument_names if reference_subject else []
        )
    samples = read_samples(
        inputs, params, contract=contract, names=names, owns_parameters=bool(subject.groups)
    )
    samples = [replace(sample, owned=subject.owned_dtypes()) for sample in samples]
    checks = [_Check(subject, reference_subject, sample, contract) for sample in samples]
    with torch.enable_grad():
        for check in checks:
            check.run()
    findings = merge_findings([item for check in checks for item in check.occurrences])
    refused = {k: v for check in checks for k, v in check.refused.items()}
    report = Report(
        subject=subject.label,
        findings=tuple(sort_findings(_drop_repeated_notes(findings))),
        tried=sum(check.tried for check in checks),
        refused=tuple(refused.items()),
        skipped=tuple(
            dict.fromkeys(skipped + [text for check in checks for text in check.skipped])
        ),
    )
    if raises and report.at_least(fail_on):
        raise ConformanceError(report)
    return report


_OWN_WEIGHTS = (
    "reference: it holds the module's own weights, which are cast with the module and not in it; "
    "give a module with the same parameters and a plain forward"
)


@dataclass
class _Check:
    """One subject on one sample."""

    subject: Subject
    reference: Subject | None
    sample: Sample
    contract: OpContract | None
    occurrences: list[tuple[tuple[object, ...], Finding, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        inside_fp32 = self.contract is not None and self.contract.inside == "fp32"
        self.numerics = Numerics(self.subject, self.reference, self.sample, inside_fp32=inside_fp32)

    def run(self) -> None:
        # an operator that is in place by intention cannot work on a leaf that requires a gradient
        if "leaf Variable that requires grad" in str(
            attempt(self.subject, self.sample, Setting(None)).error
        ):
            self.sample = replace(self.sample, behind_clone=True)
            self.numerics = self.numerics.with_sample(self.sample)
        outcomes: dict[Setting, Outcome] = {}
        failures: list[tuple[Setting, Outcome]] = []
        groups = tuple(dict.fromkeys((*self.sample.groups, *self.subject.groups)))
        for setting in settings(
            self.sample, groups, exhaustive=self.reference is not None or self.contract is not None
        ):
            outcome = attempt(self.subject, self.sample, setting, watch_inputs=True)
            self.tried += 1
            if outcome.ran:
                outcomes[setting] = outcome
                self._check_dtypes(setting, outcome)
            else:
                failures.append((setting, outcome))
        if not outcomes:
            error = failures[0][1].error
            assert error is not None
            if failure := find_failure(error):
                location_text = f"{failure.location.file}:{failure.location.line}: "
            else:
                location_text = ""
            with_what = f"with {self.sample.describe()}: {location_text}{first_line(error)}"
            raise UsageError(f"{self.subject.label} runs under no dtype combination {with_what}")
        for setting, outcome in failures:
            self._classify_failure(setting, outcome)
        base = next(iter(outcomes))
        if not self._is_deterministic(base):
            self.skipped.append(
                "numerics: two runs with different seeds differ, so results of different dtypes"
                " cannot be compared"
            )
        else:
            self._check_numerics(outcomes)
        # rounding differences between two orders of addition are smallest in fp32
        base = min(
            outcomes, key=lambda s: (torch.finfo(s.lowest(self.sample)).eps, s.autocast is not None)
        )
        self._record(
            aliasing_faults(
                self.numerics, base, outcomes[base], stable=self._is_deterministic(base)
            ),
            base,
        )

    def _record(self, faults: Sequence[Fault], setting: Setting) -> None:
        self.occurrences += [(key, finding, setting.describe()) for key, finding in faults]

    def _check_dtypes(self, setting: Setting, outcome: Outcome) -> None:
        self._record(gradient_faults(outcome, setting), setting)
        if self.contract is not None:
            self._record(contract_faults(outcome, setting, self.subject, self.contract), setting)
        else:
            if self.reference is not None:
                reference_outcome = attempt(self.reference, self.sample, setting, forward_only=True)
            else:
                reference_outcome = None
            self._record(
                output_faults(outcome, setting, self.sample, self.subject, reference_outcome),
                setting,
            )

    def _classify_failure(self, setting: Setting, outcome: Outcome) -> None:
        if self.reference is not None:
            plain_runs = attempt(self.reference, self.sample, setting).ran
        else:
            plain_runs = None
        reason = accepted_failure_reason(
            outcome,
            setting,
            self.sample,
            self.subject,
            plain_runs=plain_runs,
            declared=self.contract is not None,
        )
        if reason is None:
            unlikely = Severity.NOTE if plain_runs is None else Severity.WARNING
            if setting.produced or self.contract is not None:
                severity = Severity.ERROR
            else:
                severity = unlikely
            if setting.inside and outcome.stage == BACKWARD:
                # trainers run backward outside the region
                severity = min(severity, Severity.WARNING)
            self._record(
                [failure_finding(outcome, setting, self.subject, severity=severity)], setting
            )
        else:
            assert outcome.error is not None
            self.refused[setting.describe()] = f"{reason}: {first_line(outcome.error)}"

    def _is_deterministic(self, setting: Setting) -> bool:
        """Whether the function draws no random numbers."""
        first, second = (
            attempt(self.subject, self.sample, setting, seed=seed).results() for seed in (0, 1)
        )
        return all(n in second and _is_close(second[n], t) for n, t in first.items())

    def _check_numerics(self, outcomes: dict[Setting, Outcome]) -> None:
        """Plain code without a reference is its own yardstick: of it only weights that are rounded
        before their use are told.
        """
        settings_to_check = [s for s in outcomes if not s.inside and s.produced]
        has_yardstick = self.reference is not None or any(o.functions for o in outcomes.values())
        if has_yardstick and self.reference is None and not self.numerics.has_plain_twin:
            self.skipped.append(
                "numerics: autograd does not differentiate the forward to the same gradients; give"
                " a reference"
            )
        if has_yardstick:
            for setting in sorted(
                settings_to_check, key=lambda s: -torch.finfo(s.lowest(self.sample)).eps
            ):
                self._record(precision_faults(outcomes[setting], setting, self.numerics), setting)
        if any(finding.code == "AC006" for _, finding, _ in self.occurrences):
            return  # the longer run would say the same again
        for setting in [
            s
            for s in settings_to_check
            if len(self.sample.dtypes_in_play(s.group_dtypes)) == 1 and s.autocast is None
        ][:3]:
            if faults := rounded_weight_faults(self.numerics, setting):
                self._record(faults, setting)
                break
        if not has_yardstick:
            return
        # as built when that is low, else all of it low, else fp32 under autocast
        low = [s for s in settings_to_check if s.lowest(self.sample) in LOW]
        lowest = [s for s in low if s.autocast is None][:1] + [
            s for s in low if s.autocast is not None
        ][:1]
        for setting in lowest:
            faults, reason = long_sum_faults(self.numerics, setting)
            self._record(faults, setting)
            self.skipped += [reason] if reason else []
            if faults:
                return


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    actual = actual.detach().double()
    expected = expected.detach().double()
    distance = torch.nan_to_num(actual - expected).norm()
    return actual.shape == expected.shape and bool(
        distance <= 8 * torch.finfo(expected.dtype).eps ** 0.5 * torch.nan_to_num(expected).norm()
    )


def _drop_repeated_notes(findings: list[Finding]) -> list[Finding]:
    """A note for a guessed combination that repeats an error with the same code and function."""
    worse = {(f.code, f.place.symbol) for f in findings if f.severity > Severity.NOTE}
    return [
        f for f in findings if f.severity > Severity.NOTE or (f.code, f.place.symbol) not in worse
    ]


_OPTIONS = ("reference", "params", "contract")


@dataclass(frozen=True)
class Target:
    """What to check: the function, its inputs, and its `reference`, `params` and `contract` where
    given.
    """

    function: Any
    inputs: Any
    options: Mapping[str, Any]


def load_target(text: str) -> Target:
    """`NAME` is a `build()`: it returns `(callable, inputs)`, or `(callable, inputs, options)`.

    options  `reference`, `params` or `contract`

    Raises  UsageError for a file or a name that does not fit, in one line
    """
    source, colon, name = text.rpartition(":")
    if not colon or not name.replace(".", "").isidentifier():
        source = text
        name = "build"
    with convert_import_errors(source):
        module = load_module(source)
    build = get_member(module, name, source)
    if not inspect.isfunction(build) or required_parameters(build):
        raise UsageError(
            f"{name} needs inputs", fix=f"a build() in {source} that returns ({name}, inputs)"
        )
    try:
        result = build()
    except Exception as error:
        raise UsageError(f"{source}:{name}() raised {describe_exception(error)}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        advice = "return (callable, inputs), where inputs is a tuple of arguments"
        raise UsageError(f"{source}:{name}() returned {type(result).__name__}", fix=advice)
    options = dict(result[2]) if len(result) == 3 else {}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(
            f"{source}:{name}() returned the option {unknown[0]!r}",
            fix=f"known options: {', '.join(_OPTIONS)}",
        )
    return Target(result[0], result[1], options)


def triton_interpreted_without_gpu() -> AbstractContextManager[None]:
    """Within it Triton kernels, if any were imported, run in the repaired interpreter where there
    is no GPU.
    """
    if torch.cuda.is_available() or "triton" not in sys.modules:
        return nullcontext()
    from ..interpreter import interpreted

    return interpreted()
