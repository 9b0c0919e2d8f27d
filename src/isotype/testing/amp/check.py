"""`ampcheck` runs a differentiable function under every dtype combination that a trainer produces,
and reports faults. `load_target` loads the function that the command line names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...doctor.loading import (
    convert_import_errors,
    describe_exception,
    get_member,
    import_on_any_device,
    load_module,
    required_parameters,
)
from ...errors import UsageError
from ...finding import Finding, Severity, render_findings, sort_findings
from ...ops.contract import OpContract
from .attempt import BACKWARD, Fault, Outcome, attempt
from .locate import find_failure
from .numerics import (
    Measurement,
    Numerics,
    different_function_faults,
    long_sum_faults,
    precision_faults,
    rounded_weight_faults,
)
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
    """Raised if the function has faults under mixed precision. `report` contains the findings. The
    message of the error is the text of the whole report.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("\n" + report.render())


@dataclass(frozen=True)
class Report:
    """The result of `ampcheck(..., raises=False)`.

    subject       the name of the checked function
    tried         number of combinations that were run
    refused       setting and reason of each combination for which the function raises an error and
                  may do so, for example because plain PyTorch raises an error too
    skipped       checks that were not possible, with the reason
    measurements  the error of each result, and the error of plain code with the same dtypes
    compared_in   the dtype in which the function was compared with the reference, or ""
    """

    subject: str
    findings: tuple[Finding, ...]
    tried: int
    refused: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    compared_in: str = ""

    @property
    def ok(self) -> bool:
        """True if there is no finding of severity warning or error."""
        return not self.at_least(Severity.WARNING)

    def at_least(self, severity: Severity) -> list[Finding]:
        """Returns the findings at or above `severity`."""
        return [finding for finding in self.findings if finding.severity >= severity]

    def codes(self, severity: Severity = Severity.WARNING) -> list[str]:
        """Returns the codes of the findings at or above `severity`, without duplicates."""
        return sorted({finding.code for finding in self.at_least(severity)})

    def render(self) -> str:
        """Returns the report as text."""
        text = render_findings(self.findings, subject=self.subject)
        counts = f"{self.tried} combinations run"
        if self.refused:
            counts += f", {len(self.refused)} refused"
        return "\n".join([f"{text} ({counts})", *self.skipped_lines()])

    def skipped_lines(self) -> list[str]:
        """Returns a line of text for each check that was not possible."""
        return [f"  not checked  {reason}" for reason in self.skipped]


class Occurrence(NamedTuple):
    """A finding under one combination of dtypes and autocast. Occurrences with the same key belong
    to the same fault.
    """

    key: tuple[object, ...]
    finding: Finding
    setting: str


def merge_findings(occurrences: Sequence[Occurrence]) -> list[Finding]:
    """Merges all findings about the same fault into one finding: the most severe one, with a list
    of all dtype combinations in which the fault occurred.
    """
    worst: dict[tuple[object, ...], Finding] = {}
    settings_by_key: dict[tuple[object, ...], dict[str, None]] = {}
    for key, finding, setting in occurrences:
        if key not in worst or finding.severity > worst[key].severity:
            worst[key] = finding
        settings_by_key.setdefault(key, {})[setting] = None
    merged = []
    for key, finding in worst.items():
        labels = list(settings_by_key[key])
        examples = "; ".join(labels[:3])
        if len(labels) > 3:
            examples += f"; and {len(labels) - 3} more"
        details = (*finding.details, ("seen with", examples))
        merged.append(replace(finding, details=details))
    return merged


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
    """Gradcheck for mixed precision. Runs `fn` under the dtype combinations that trainers produce,
    and reports what breaks, where and why.

    fn         an autograd.Function, an nn.Module, or any callable; it runs on the device of its
               inputs
    inputs     one call: a tensor, a tuple of arguments or a dict of keyword arguments; or a list of
               calls. If no tensor requires a gradient, all floating tensors are treated as if they
               did
    reference  the same mathematics in plain PyTorch. The reference tells how large numerical errors
               may be, which dtypes the outputs must have, and which combinations must work. Without
               a reference, results are compared with `fn` in fp64. The allowed error is then
               measured with the forward of `fn` as ordinary code that autograd differentiates
    params     further arguments, after `inputs`, that a trainer keeps in another dtype (weights).
               Without `params` and `contract`, a tensor is treated as a weight if its first size
               differs from the first size of the first tensor
    contract   an OpContract, which declares the arguments that share a dtype, and the dtypes of
               outputs and gradients
    raises     whether to raise ConformanceError if there is a finding at or above `fail_on`
    ->         the Report
    Raises     ConformanceError (an AssertionError) with the whole report; UsageError if the
               function runs under no combination
    """
    subject = Subject(fn)
    reference_subject = None
    skipped = []
    if reference is not None:
        reference_subject = Subject(reference)
        if subject.module is not None and reference_subject.shares_parameters(subject.module):
            reference_subject = None
            skipped.append(_OWN_WEIGHTS)
    if contract:
        names = list(contract.inputs)
    else:
        names = subject.argument_names
        if not names and reference_subject:
            names = reference_subject.argument_names
    samples = read_samples(
        inputs, params, contract=contract, names=names, owns_parameters=bool(subject.groups)
    )
    samples = [replace(sample, parameter_dtypes=subject.parameter_dtypes()) for sample in samples]
    checks = [_Check(subject, reference_subject, sample, contract) for sample in samples]
    with torch.enable_grad(), _interpret_triton_without_gpu():
        for check in checks:
            _run_check(check)
    findings = merge_findings([item for check in checks for item in check.occurrences])
    refused: dict[str, str] = {}
    for check in checks:
        refused |= check.refused
        skipped += check.skipped
    report = Report(
        subject=subject.label,
        findings=tuple(sort_findings(_drop_repeated_notes(findings))),
        tried=sum(check.tried for check in checks),
        refused=tuple(refused.items()),
        skipped=tuple(dict.fromkeys(skipped)),
        measurements=tuple(
            measurement for check in checks for measurement in check.numerics.measurements
        ),
        compared_in=checks[-1].numerics.compared_in if checks else "",
    )
    if raises and report.at_least(fail_on):
        raise ConformanceError(report)
    return report


def _run_check(check: _Check) -> None:
    """Runs a check. If the function runs under no combination of dtypes on the CPU, but launches
    Triton kernels, the check runs once more while `torch.cuda` reports a GPU.

    Raises  UsageError as `_Check.run`
    """
    try:
        check.run()
    except UsageError:
        if torch.cuda.is_available() or "triton" not in sys.modules:
            raise
        from ...doctor.kernels.compile_inputs import DEFAULT_TARGET, parse_target
        from ...doctor.kernels.simulated_gpu import simulate_gpu_properties

        check.tried = 0
        with simulate_gpu_properties(parse_target(DEFAULT_TARGET)):
            check.run()


_OWN_WEIGHTS = (
    "reference: it refers to the weights of the checked module, so they cannot be cast separately; "
    "pass a module with the same parameters and a plain forward"
)


@dataclass
class _Check:
    """Checks one function with one set of arguments."""

    subject: Subject
    reference: Subject | None
    sample: Sample
    contract: OpContract | None
    occurrences: list[Occurrence] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    tried: int = 0

    def __post_init__(self) -> None:
        inside_fp32 = self.contract is not None and self.contract.inside == "fp32"
        self.numerics = Numerics(self.subject, self.reference, self.sample, inside_fp32=inside_fp32)

    def run(self) -> None:
        """Runs the function with every combination of dtypes and autocast, and applies the rules to
        the results.
        """
        # an in-place operator cannot write to a leaf that requires a gradient
        error = attempt(self.subject, self.sample, Setting(None)).error
        if "leaf Variable that requires grad" in str(error):
            self.sample = replace(self.sample, passes_clones=True)
            self.numerics = self.numerics.with_sample(self.sample)
        outcomes: dict[Setting, Outcome] = {}
        failures: list[tuple[Setting, Outcome]] = []
        groups = tuple(dict.fromkeys((*self.sample.groups, *self.subject.groups)))
        is_exhaustive = self.reference is not None or self.contract is not None
        for setting in settings(self.sample, groups, is_exhaustive=is_exhaustive):
            outcome = attempt(self.subject, self.sample, setting, watch_inputs=True)
            self.tried += 1
            if outcome.succeeded:
                outcomes[setting] = outcome
                self._check_dtypes(setting, outcome)
            else:
                failures.append((setting, outcome))
        if not outcomes:
            error = failures[0][1].error
            assert error is not None
            message = first_line(error)
            if failure := find_failure(error):
                message = f"{failure.location.file}:{failure.location.line}: {message}"
            raise UsageError(
                f"{self.subject.label} runs under no dtype combination with"
                f" {self.sample.describe()}: {message}"
            )
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

        def precision(setting: Setting) -> tuple[float, bool]:
            step = torch.finfo(setting.lowest(self.sample)).eps
            return step, setting.autocast is not None

        # rounding differences between two orders of addition are smallest in fp32
        base = min(outcomes, key=precision)
        is_stable = self._is_deterministic(base)
        self._record(
            aliasing_faults(self.numerics, base, outcomes[base], is_stable=is_stable), base
        )

    def _record(self, faults: Sequence[Fault], setting: Setting) -> None:
        """Stores the faults that were found under one combination of dtypes and autocast."""
        label = setting.describe()
        self.occurrences += [Occurrence(key, finding, label) for key, finding in faults]

    def _check_dtypes(self, setting: Setting, outcome: Outcome) -> None:
        """Applies the rules about dtypes to the result of one run."""
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
        """Decides whether the error that a run raised is a fault, and stores the result. The
        function may refuse some combinations of dtypes. For all other combinations, the error is a
        fault.
        """
        if self.reference is not None:
            does_reference_run = attempt(self.reference, self.sample, setting).succeeded
        else:
            does_reference_run = None
        reason = accepted_failure_reason(
            outcome,
            setting,
            self.sample,
            self.subject,
            does_reference_run=does_reference_run,
            has_contract=self.contract is not None,
        )
        if reason is not None:
            assert outcome.error is not None
            self.refused[setting.describe()] = f"{reason}: {first_line(outcome.error)}"
            return
        if setting.is_produced_by_trainer or self.contract is not None:
            severity = Severity.ERROR
        elif does_reference_run is None:
            severity = Severity.NOTE
        else:
            severity = Severity.WARNING
        if setting.is_backward_in_autocast and outcome.stage == BACKWARD:
            # trainers run backward outside the region
            severity = min(severity, Severity.WARNING)
        fault = failure_finding(outcome, setting, self.subject, severity=severity)
        self._record([fault], setting)

    def _is_deterministic(self, setting: Setting) -> bool:
        """True if the function does not use random numbers."""
        first = attempt(self.subject, self.sample, setting, seed=0).results()
        second = attempt(self.subject, self.sample, setting, seed=1).results()
        if not set(first) <= set(second):
            return False
        return all(_is_close(second[result], value) for result, value in first.items())

    def _check_numerics(self, outcomes: dict[Setting, Outcome]) -> None:
        """Checks numerical errors. If the function has no reference and no hand-written backward,
        there is nothing to compare with. In this case the check only reports weights that are
        rounded before they are used.
        """
        settings_to_check = [
            setting
            for setting in outcomes
            if not setting.is_backward_in_autocast and setting.is_produced_by_trainer
        ]
        if self.reference is not None:
            faults, different_results = different_function_faults(self.numerics)
            self._record(faults, Setting(None))
            self.numerics.different_results = different_results
        has_yardstick = self.reference is not None or any(
            outcome.functions for outcome in outcomes.values()
        )
        if has_yardstick and self.reference is None and not self.numerics.has_plain_twin:
            self.skipped.append(
                "numerics: autograd does not differentiate the forward to the same gradients; give"
                " a reference"
            )
        if has_yardstick:
            by_precision = sorted(
                settings_to_check, key=lambda s: -torch.finfo(s.lowest(self.sample)).eps
            )
            for setting in by_precision:
                self._record(precision_faults(outcomes[setting], setting, self.numerics), setting)
        if any(finding.code == "AC006" for _, finding, _ in self.occurrences):
            return  # the check with more rows would report the same error
        without_autocast = [setting for setting in settings_to_check if setting.autocast is None]
        with_autocast = [setting for setting in settings_to_check if setting.autocast is not None]
        uniform = [
            setting
            for setting in without_autocast
            if len(self.sample.dtypes_in_play(setting.group_dtypes)) == 1
        ]
        for setting in uniform[:3]:
            if faults := rounded_weight_faults(self.numerics, setting):
                self._record(faults, setting)
                break
        if not has_yardstick:
            return
        # one setting without autocast (the tensors as built if they are low-precision, else all
        # cast to a low dtype), and one with autocast
        for candidates in (without_autocast, with_autocast):
            lowest = [setting for setting in candidates if setting.lowest(self.sample) in LOW]
            if not lowest:
                continue
            faults, reason = long_sum_faults(self.numerics, lowest[0])
            self._record(faults, lowest[0])
            if reason:
                self.skipped.append(reason)
            if faults:
                return


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    """True if two results that were computed with different random seeds are equal up to rounding."""
    actual = actual.detach().double()
    expected = expected.detach().double()
    distance = torch.nan_to_num(actual - expected).norm()
    size = torch.nan_to_num(expected).norm()
    tolerance = 8 * torch.finfo(expected.dtype).eps ** 0.5
    if actual.shape != expected.shape:
        return False
    return bool(distance <= tolerance * size)


def _drop_repeated_notes(findings: list[Finding]) -> list[Finding]:
    """Removes a finding of severity note if there is a warning or an error with the same code for
    the same function.
    """
    faults = [finding for finding in findings if finding.severity > Severity.NOTE]
    reported = {(fault.code, fault.place.symbol) for fault in faults}
    remaining = []
    for finding in findings:
        is_repeated = (finding.code, finding.place.symbol) in reported
        if finding.severity > Severity.NOTE or not is_repeated:
            remaining.append(finding)
    return remaining


_OPTIONS = ("reference", "params", "contract")


@dataclass(frozen=True)
class Target:
    """The arguments of `ampcheck`, which are a function, its inputs, and the options `reference`,
    `params` and `contract`.
    """

    function: Any
    inputs: Any
    options: Mapping[str, Any]


def load_target(text: str) -> Target:
    """Loads a function without parameters and calls it. The function must return `(callable,
    inputs)` or `(callable, inputs, options)`. Returns the result of this call as a `Target`.

    text    FILE or FILE:NAME; the name is `build` by default
    Raises  UsageError with a message of one line, if the file or the function cannot be used
    """
    source, colon, name = text.rpartition(":")
    if not colon or not name.replace(".", "").isidentifier():
        source = text
        name = "build"
    with convert_import_errors(source):
        module = import_on_any_device(partial(load_module, source))
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
    options: dict[str, Any] = {}
    if len(result) == 3:
        options = dict(result[2])
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(
            f"{source}:{name}() returned the option {unknown[0]!r}",
            fix=f"known options: {', '.join(_OPTIONS)}",
        )
    return Target(result[0], result[1], options)


def _interpret_triton_without_gpu() -> AbstractContextManager[None]:
    """Returns a context in which Triton kernels run in the repaired interpreter if there is no GPU.
    If Triton was not imported, or has no supported version, the context has no effect.
    """
    if torch.cuda.is_available() or "triton" not in sys.modules:
        return nullcontext()
    from ..interpreter import interpreted, require_triton

    try:
        require_triton()
    except UsageError:
        return nullcontext()
    return interpreted()
