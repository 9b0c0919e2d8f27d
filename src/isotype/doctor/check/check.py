"""Checks configurations: reads, joins into runs, compiles each into its record, asks every rule."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from ...finding import Finding, Place, Severity
from .collect import Collection, collect
from .devices import parse as parse_device
from .effective import effective_precision
from .programs import process_environment
from .record import ROLES, Record
from .rules import RULES
from .runs import MAIN, runs
from .settings import Facts
from .versions import installed as installed_versions


@dataclass
class Checked:
    """records: one a run of another tool; own: runs of Isotype itself, which need no record; files: how many were looked at."""

    findings: list[Finding]
    records: list[Record]
    files: int
    own: int = 0


def check(paths: Iterable[str], *, device: str | None = None, environment: bool = False, installed: bool = False) -> Checked:
    """Everything wrong with the configurations under `paths`.

    device       what it will run on, as `h100`; None leaves rules about hardware to what the files say
    environment  include this shell's ACCELERATE_*, FSDP_* and DEEPSPEED_* variables
    installed    include the versions installed beside this Python, and pairs of them that do not fit
    Raises       UsageError
    """
    if device is not None:
        parse_device(device)
    found = collect(paths)
    extra = []
    if environment:
        extra.append(process_environment(os.environ))
    if installed:
        extra.append(installed_versions())
    own = 0
    records, findings = [], [*found.trouble, *(_pairs() if installed else [])]
    for facts in runs(found, device):
        facts.documents += [d for d in extra if d.settings]
        if any(d.tool == "isotype" for d in facts.documents):
            own += 1
            findings += _isotype(facts, found)
            continue
        record = effective_precision(facts)
        if record.roles or any(d.tool in MAIN or d.tool in ("accelerate", "deepspeed") for d in facts.documents):
            records.append(record)
        for function in RULES.values():
            findings += function(record)
    return Checked(_distinct(findings), records, found.files, own)


def _isotype(facts: Facts, found: Collection) -> list[Finding]:
    from .isotype_run import check_run

    return [finding for d in facts.documents if d.tool == "isotype" for finding in check_run(d, found.trees[d.file], facts)]


def _pairs() -> list[Finding]:
    """Installed packages whose own requirements are not met by what is installed beside them."""
    from ...environment.versions import installed as distributions
    from ...environment.versions import mismatched_pairs

    return list(mismatched_pairs(distributions()))


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Files shared by several runs say the same thing once."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        kept.setdefault((finding.code, str(finding.place), finding.message), finding)
    return list(kept.values())


def trouble_without_files(checked: Checked, paths: Iterable[str]) -> Finding | None:
    """A note when nothing was recognised: silence would look like a clean bill."""
    if checked.records or checked.findings or checked.own:
        return None
    return Finding(
        code="CF099",
        severity=Severity.NOTE,
        message=f"no configuration found in {checked.files} file{'s' * (checked.files != 1)}",
        place=Place(file=", ".join(paths)),
        fix="give the folder or file with the training configuration",
    )


def table(record: Record) -> str:
    """What the run will really do: role, value, why, and the line that decided."""
    rows = []
    for role in ROLES:
        if role in record.roles:
            decision = record.roles[role]
            by = decision.by
            where = f"{by.key}  {by.file}{f':{by.line}' if by.line else ''}" if by is not None else ""
            rows.append((role, decision.value, decision.why, where))
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    main = next((d for d in record.facts.documents if d.tool in MAIN), record.facts.documents[0])
    lines = [f"what {main.file} will really do ({main.tool})"]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)) + f"  {row[3]}".rstrip() for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_json(record: Record) -> dict[str, object]:
    return {
        "tool": record.tool,
        "files": sorted({d.file for d in record.facts.documents}),
        "roles": {
            role: {"value": d.value, "why": d.why, **({"key": d.by.key, **d.by.place.as_json()} if d.by is not None else {})}
            for role, d in record.roles.items()
        },
    }
