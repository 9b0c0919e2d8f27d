"""`ampcheck`: a differentiable function under every dtype combination that a trainer produces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import UsageError
from ...finding import Finding, Severity, worst_first
from ...ops.contract import OpContract
from . import raising
from .attempt import Outcome, attempt
from .report import ConformanceError, Report, merged
from .samples import Sample, read_samples
from .settings import Setting, settings
from .subjects import Subject

Seen = tuple[tuple[object, ...], Finding, str]


def ampcheck(
    fn: Any,
    inputs: Any,
    *,
    reference: Any = None,
    params: Sequence[Any] = (),
    contract: OpContract | None = None,
    compile: str | None = None,
    raises: bool = True,
    fail_on: Severity = Severity.WARNING,
) -> Report:
    """Runs `fn` under the dtype combinations a trainer produces and says what breaks, where, why and what to do."""
    subject, plain = Subject(fn), Subject(reference) if reference is not None else None
    samples = read_samples(inputs, params, contract=contract, names=_names(subject, plain, contract), grads_by_default=not subject.groups)
    seen: list[Seen] = []
    refused: dict[str, str] = {}
    tried = 0
    for sample in samples:
        groups = tuple(dict.fromkeys((*sample.groups, *subject.groups)))
        for setting in settings(sample, groups, every=reference is not None or contract is not None):
            outcome = attempt(subject, sample, setting)
            tried += 1
            if not outcome.ran:
                plain_runs = attempt(plain, sample, setting).ran if plain is not None else None
                why = raising.legitimate(outcome, setting, sample, subject, plain_runs=plain_runs, declared=contract is not None)
                if why is None:
                    seen.append((*raising.finding_for(outcome, setting, subject), setting.describe()))
                else:
                    refused[setting.describe()] = f"{why}: {raising.first_line(outcome.error)}"
    report = Report(
        subject=subject.label,
        findings=tuple(worst_first(merged(seen))),
        tried=tried,
        refused=tuple(refused.items()),
    )
    if raises and report.at_least(fail_on):
        raise ConformanceError(report)
    return report


def _names(subject: Subject, plain: Subject | None, contract: OpContract | None) -> list[str]:
    if contract is not None:
        return list(contract.inputs)
    return subject.argument_names or (plain.argument_names if plain is not None else [])
