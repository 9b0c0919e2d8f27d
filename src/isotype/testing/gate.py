"""`isotype doctor gate` compares a function with its reference in several respects. It answers the
following questions, and combines the answers into one verdict.

fp64       does it compute the same function as the reference, if both run in fp64
precision  is its error at most four times as large as that of the reference in the same dtypes
gradients  do gradients have the right dtype, and do they stay right if inputs are frozen
dtypes     does it run under every combination of dtypes and autocast that a trainer produces
kernels    do the Triton kernels that it launches compile for these dtypes
compile    does it run under torch.compile, where Python floats reach Triton kernels as fp64
offsets    do the offsets of its kernels fit in int32 at the largest shape

The verdict is only `pass` if every question was asked. The one exception is the question about
offsets, which needs the largest shape as an argument.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..doctor.loading import (
    convert_import_errors,
    get_member,
    import_on_any_device,
    load_module,
    required_parameters,
)
from ..errors import UsageError
from ..finding import Finding, Severity, sort_findings
from ..wording import pluralise
from .amp.check import Report, ampcheck
from .amp.compiled import compile_faults
from .amp.numerics import Measurement, Numerics
from .amp.samples import Subject, read_samples

PASS = "pass"
FAIL = "fail"
NOT_ASKED = "not asked"
# question -> the codes of the findings that answer it with no
_CODES = {
    "fp64": ("AC023",),
    "precision": ("AC006", "AC007", "AC022"),
    "gradients": ("AC002", "AC003", "AC008", "AC009", "AC010", "AC011", "AC012"),
    "dtypes": ("AC001", "AC004", "AC014"),
}


@dataclass
class Question:
    """One question and its answer.

    detail       what was measured, or why the question was not asked
    is_required  True if the verdict can only be `pass` when the question was asked
    """

    name: str
    verdict: str = PASS
    detail: str = ""
    findings: list[Finding] = field(default_factory=list)
    is_required: bool = True

    def judge(self) -> None:
        """Sets the verdict to `fail` if there is a finding of severity warning or error."""
        if any(finding.severity > Severity.NOTE for finding in self.findings):
            self.verdict = FAIL


@dataclass
class GateResult:
    """The answers to all questions."""

    subject: str
    questions: list[Question]
    measurements: tuple[Measurement, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        findings = [finding for question in self.questions for finding in question.findings]
        return sort_findings(finding for finding in findings if finding.severity > Severity.NOTE)

    @property
    def verdict(self) -> str:
        if any(question.verdict == FAIL for question in self.questions):
            return FAIL
        if any(
            question.verdict == NOT_ASKED and question.is_required for question in self.questions
        ):
            return NOT_ASKED
        return PASS

    @property
    def status(self) -> int:
        """Returns the exit status: 0 for pass, 1 for fail, and 2 if a question was not asked."""
        return {PASS: 0, FAIL: 1, NOT_ASKED: 2}[self.verdict]

    def render(self) -> str:
        """Returns one line for each question, and then the findings."""
        lines = [self.subject]
        for question in self.questions:
            lines.append(f"  {question.name:<11}{question.verdict:<11}{question.detail}".rstrip())
        blocks = ["\n".join(lines), *(finding.render() for finding in self.findings)]
        return "\n\n".join([*blocks, f"verdict: {self.verdict}"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "questions": {
                question.name: {"verdict": question.verdict, "detail": question.detail}
                for question in self.questions
            },
            "errors": [vars(measurement) for measurement in self.measurements],
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class GateTarget:
    """The function, its reference, and the function that creates its inputs."""

    label: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    build_inputs: Callable[..., Any]


def load_gate_target(target: str, against: str, inputs: str | None = None) -> GateTarget:
    """Loads a function, its reference and its inputs. If `against` or `inputs` contain no file, the
    file of `target` is used. By default the inputs are created by a function `inputs` of this file,
    or of the reference's file.

    Raises  UsageError if one of them does not exist
    """
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise UsageError(f"{target}: expected FILE.py:FUNCTION")
    function = _load_member(source, name)
    reference_source, _, reference_name = against.rpartition(":")
    reference_source = reference_source or source
    reference = _load_member(reference_source, reference_name)
    if inputs is not None:
        inputs_source, _, inputs_name = inputs.rpartition(":")
        return GateTarget(
            f"{target} against {against}",
            function,
            reference,
            _load_member(inputs_source or source, inputs_name),
        )
    for candidate in (source, reference_source):
        build_inputs = getattr(_load(candidate), "inputs", None)
        if callable(build_inputs):
            return GateTarget(f"{target} against {against}", function, reference, build_inputs)
    raise UsageError(
        f"{source} has no function inputs()",
        fix="define inputs(rows=4, columns=64), which returns the arguments of one call",
    )


_modules: dict[str, Any] = {}


def _load(source: str) -> Any:
    key = str(Path(source).resolve()) if source.endswith(".py") else source
    if key not in _modules:
        with convert_import_errors(source):
            load = partial(load_module, source, as_package_member=True)
            _modules[key] = import_on_any_device(load)
    return _modules[key]


def _load_member(source: str, name: str) -> Callable[..., Any]:
    value: Callable[..., Any] = get_member(_load(source), name, source)
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        function: Callable[..., Any] = value.apply
        return function
    if not callable(value):
        raise UsageError(f"{source}:{name} is a {type(value).__name__}, not a function")
    return value


def run_gate(
    target: GateTarget,
    *,
    largest: Sequence[int] = (),
    architectures: Sequence[str] = ("sm_90",),
) -> GateResult:
    """Answers all questions about a function.

    largest  the arguments with which `inputs` creates tensors of the largest shape
    Raises   UsageError if the inputs cannot be created
    """
    if required_parameters(target.build_inputs):
        raise UsageError(
            "inputs() has parameters without defaults",
            fix="give each a default, so that inputs() creates a small call",
        )
    try:
        arguments = target.build_inputs()
    except Exception as error:
        raise UsageError(f"inputs() raised {type(error).__name__}: {error}") from error
    questions, report = _ask_conform(target, arguments)
    kernels, compiled, launches = _ask_kernels(target, arguments, architectures)
    if not launches and report is not None:
        _ask_compile(target, arguments, compiled)
    compiled.judge()
    kernels.judge()
    if launches:
        offsets = _ask_offsets(target, largest, architectures[0])
    else:
        offsets = Question("offsets", kernels.verdict, kernels.detail)
    measurements = report.measurements if report is not None else ()
    return GateResult(target.label, [*questions, kernels, compiled, offsets], measurements)


def _ask_conform(target: GateTarget, arguments: Any) -> tuple[list[Question], Report | None]:
    """Answers the questions for which the function runs on the CPU, or on the device of its inputs."""
    try:
        report = ampcheck(target.function, arguments, reference=target.reference, raises=False)
    except UsageError as error:
        return [Question(name, NOT_ASKED, error.message) for name in _CODES], None
    questions = []
    for name, codes in _CODES.items():
        question = Question(
            name, findings=[finding for finding in report.findings if finding.code in codes]
        )
        question.judge()
        questions.append(question)
    by_name = {question.name: question for question in questions}
    by_name["dtypes"].detail = pluralise(report.tried, "run")
    if report.refused:
        by_name["dtypes"].detail += f", {len(report.refused)} refused as they should be"
    reasons = [reason for reason in report.skipped if reason.startswith(("numerics", "reference"))]
    reason = reasons[0] if reasons else "the reference gave no results to compare with"
    by_name["fp64"].detail = f"compared in {report.compared_in}"
    by_name["precision"].detail = _describe_worst(report.measurements)
    if not report.compared_in:
        by_name["fp64"].verdict = NOT_ASKED
        by_name["fp64"].detail = reason
    if not report.measurements and by_name["fp64"].verdict != FAIL:
        by_name["precision"].verdict = NOT_ASKED
        by_name["precision"].detail = reason
    return questions, report


def _describe_worst(measurements: Sequence[Measurement]) -> str:
    """Describes the result whose error is largest in relation to the allowed error."""
    if not measurements:
        return ""
    worst = max(measurements, key=lambda measurement: measurement.error / measurement.allowed)
    if not worst.error:
        return "no rounding error"
    return (
        f"at most {worst.error / worst.allowed:.2g} of the allowed error ({worst.result},"
        f" {worst.setting}: {worst.error:.1e}, reference {worst.plain_error:.1e}, allowed"
        f" {worst.allowed:.1e})"
    )


def _ask_kernels(
    target: GateTarget, arguments: Any, architectures: Sequence[str]
) -> tuple[Question, Question, int]:
    """Compiles the kernels that the function launches. Returns the questions about kernels and
    about torch.compile, and the number of launches.
    """
    kernels = Question("kernels", detail="no Triton kernel is launched")
    compiled = Question("compile")
    if "triton" not in sys.modules:
        return kernels, compiled, 0
    from ..doctor.kernels.calls import INPUTS_AS_GIVEN, check_wrapper, split_calls
    from ..doctor.kernels.checker import Report as KernelReport
    from ..doctor.kernels.compile_inputs import Reach

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = KernelReport()
        refused: dict[str, str] = {}
        for call in split_calls(arguments):
            call_report = check_wrapper(
                target.function, call, architectures, reference=target.reference
            )
            report.add(call_report)
            refused |= call_report.refused
    if not report.launches:
        reason = refused.get(INPUTS_AS_GIVEN)
        if reason:
            kernels.verdict = NOT_ASKED
            kernels.detail = f"the function raises on a simulated GPU: {reason}"
        return kernels, compiled, 0
    names = ", ".join(report.kernels)
    kernels.detail = f"{names}: {report.compiled} compilations for {', '.join(architectures)}"
    compiled.detail = "Python floats as fp64, as Inductor passes them"
    for finding in report.findings:
        is_about_compile = dict(finding.details).get("reach") == Reach.COMPILED.description
        (compiled if is_about_compile else kernels).findings.append(finding)
    return kernels, compiled, report.launches


def _ask_compile(target: GateTarget, arguments: Any, question: Question) -> None:
    """Compares the function under torch.compile with a plain call."""
    sample = read_samples(arguments)[0]
    numerics = Numerics(Subject(target.function), Subject(target.reference), sample)
    faults = compile_faults(target.function, numerics, sample)
    question.findings += [finding for _, finding in faults]
    question.detail = "the same results and dtypes under torch.compile (aot_eager)"
    if faults:
        question.detail = ""


def _ask_offsets(target: GateTarget, largest: Sequence[int], architecture: str) -> Question:
    question = Question("offsets")
    if not largest:
        question.is_required = False
        question.verdict = NOT_ASKED
        question.detail = "give the largest shape: --largest 65536,8192"
        return question
    from ..doctor.kernels.largest import check_largest

    report = check_largest(target.function, target.build_inputs, largest, architecture)
    question.findings = report.findings
    question.judge()
    shape = ",".join(map(str, largest))
    if question.verdict == PASS and (report.refused or not report.launches):
        question.verdict = NOT_ASKED
        reason = next(iter(report.refused.values()), "no kernel is launched")
        question.detail = f"at {shape}: {reason}"
        return question
    question.detail = "; ".join([f"{', '.join(report.kernels)} at {shape}", *report.remarks])
    return question
