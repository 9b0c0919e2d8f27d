"""Implements the preflight, which runs all checks before step 1 and writes preflight.json. If a
check finds an error, the run does not start.

The checks run in phases, and the fast checks come first. The first phase checks what can be known
from the settings and the model, without running it. The later phases check the data, then the
memory, and then run a trial step. If a phase finds an error, the later phases do not run. The task
adds its own checks to each phase.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...distributed.world import ALONE, World
from ...errors import PreflightError
from ...finding import Finding, Severity, sort_findings
from ...runs.folder import RunFolder
from ..setup import PreflightSubject
from ..task import Check
from .codes import CODES, UNSKIPPABLE_REASONS
from .rehearsal import rehearse_evaluation, rehearse_samples, rehearse_step
from .static import check_device, check_disk, check_memory, check_update_sizes

PREFLIGHT_FILE = "preflight.json"
# the phase "real" rehearses a step, an evaluation and samples with the loaded model. The names of
# the phases are keys of `seconds` in preflight.json
PHASES = ("static", "data", "memory", "real")
# stage of the preflight -> its checks, in order
CHECKS: Mapping[str, tuple[Check, ...]] = {
    "static": (
        Check(("PF001",), check_device),
        Check(("PF003",), check_update_sizes),
        Check(("PF004",), check_disk),
    ),
    "memory": (Check(("PF011",), check_memory),),
    "real": (
        Check(("PF012", "PF013", "PF014", "PF015"), rehearse_step),
        Check(("PF016",), rehearse_evaluation),
        Check(("PF017",), rehearse_samples),
    ),
}


@dataclass
class Outcome:
    """The result of the preflight.

    findings       the problems that the checks found
    skipped        for each check that was left out: its code -> the user's reason
    checked_codes  the codes of the checks that ran
    seconds        the time of each phase
    """

    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    checked_codes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        return any(finding.severity >= Severity.ERROR for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "refused": self.refused,
            "findings": [finding.to_dict() for finding in sort_findings(self.findings)],
            "skipped": [
                {"code": code, "check": CODES[code], "reason": reason}
                for code, reason in self.skipped.items()
            ],
            "checks": {code: CODES[code] for code in self.checked_codes},
            "seconds": {phase: round(seconds, 3) for phase, seconds in self.seconds.items()},
        }

    def header_rows(self) -> list[tuple[str, str]]:
        """Returns rows for the run's header. The rows contain a summary, each problem that was
        found, and each check that was skipped.
        """
        passed = len(self.checked_codes) - len({finding.code for finding in self.findings})
        return [
            (
                "preflight",
                f"{passed} of {len(self.checked_codes)} checks passed in {sum(self.seconds.values()):.1f} s",
            ),
            *[
                (str(finding.severity), _format_finding(finding))
                for finding in sort_findings(self.findings)
            ],
            *[
                ("skipped", f"{code} {CODES[code]}: {reason}")
                for code, reason in self.skipped.items()
            ],
        ]


def preflight(
    subject: PreflightSubject,
    skips: Mapping[str, str],
    *,
    checks: Mapping[str, tuple[Check, ...]] = CHECKS,
    world: World = ALONE,
) -> Outcome:
    """Runs the checks and writes preflight.json. Raises a PreflightError that contains all errors.
    If the run is resumed, only the checks that need no training step are run.

    subject  the prepared run that is checked
    skips    for each check that is left out: its code -> the user's reason
    checks   the checks of each phase; the checks of the task are added to them
    world    the processes of the run. Each process checks its own machine and step. If one process
             finds an error, the run does not start in any process. The file preflight.json contains
             the result of the first process.
    """
    path = subject.folder / PREFLIGHT_FILE
    previous_content = RunFolder(path.parent).read_json(path.name) if subject.is_resuming else {}
    skipped = (read_skipped(path) if subject.is_resuming else {}) | dict(skips)
    outcome = Outcome(skipped=skipped)
    task_checks = subject.task.checks()
    for phase in PHASES:
        # the next phase may run a model that the processes share: no process may run it alone
        if world.any(outcome.refused) or (subject.is_resuming and phase != "static"):
            break
        start_time = time.perf_counter()
        for check in (*checks.get(phase, ()), *task_checks.get(phase, ())):
            if check.codes[0] not in skipped:
                outcome.findings += [
                    finding for finding in check.run(subject) if finding.code not in skipped
                ]
                outcome.checked_codes += [code for code in check.codes if code not in skipped]
        outcome.seconds[phase] = time.perf_counter() - start_time
    outcome_content = outcome.to_dict()
    earlier_contents = previous_content.get("resumed")
    resumed_contents = [
        *(earlier_contents if isinstance(earlier_contents, list) else []),
        outcome_content,
    ]
    if world.is_first:
        content = (
            previous_content | {"skipped": outcome_content["skipped"], "resumed": resumed_contents}
            if previous_content
            else outcome_content
        )
        RunFolder(path.parent).write_json(path.name, content)
    error = refusal_error(outcome) if outcome.refused else None
    for rank, refusal in enumerate(world.gather([error.message, error.fix] if error else None)):
        if refusal:
            raise PreflightError(
                f"rank {rank}: {refusal[0]}" if rank else refusal[0], fix=refusal[1]
            )
    return outcome


def refusal_error(outcome: Outcome) -> PreflightError:
    errors = [
        finding for finding in sort_findings(outcome.findings) if finding.severity >= Severity.ERROR
    ]
    codes = list(dict.fromkeys(finding.code for finding in errors))
    findings_text = "\n".join(finding.render() for finding in sort_findings(outcome.findings))
    skip = next(
        (f', or --skip {code}="why it does not matter here"' for code in codes if code in CODES), ""
    )
    return PreflightError(
        f"refused before step 1: {', '.join(codes)}\n{findings_text}", fix=f"mend it{skip}"
    )


def _format_finding(finding: Finding) -> str:
    return f"{finding.code} {finding.message}" + (f"; {finding.fix}" if finding.fix else "")


def read_skipped(path: Path) -> dict[str, str]:
    """Returns the checks that were skipped when the run started, as a mapping from code to reason.
    Invalid entries are ignored.
    """
    skipped = RunFolder(path.parent).read_json(path.name).get("skipped")
    return {
        entry["code"]: entry["reason"]
        for entry in (skipped if isinstance(skipped, list) else [])
        if isinstance(entry, dict)
        and isinstance(entry.get("reason"), str)
        and str(entry.get("code")) in CODES.keys() - UNSKIPPABLE_REASONS.keys()
    }
