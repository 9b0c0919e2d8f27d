"""Checks configurations: reads, joins into runs, compiles each into its record, asks every rule."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...finding import Finding, Place, Severity
from .collect import Collection, collect
from .rules import RULES
from .settings import ROLES, Document, Facts, Record, parse_device
from .tools import effective_precision


@dataclass
class Checked:
    """records: one a run of another tool; files: how many were looked at."""

    findings: list[Finding]
    records: list[Record]
    files: int


def check(paths: Iterable[str], *, device: str | None = None) -> Checked:
    """Everything wrong with the configurations under `paths`.

    device       what it will run on, as `h100`; None leaves rules about hardware to what the files say
    Raises       UsageError
    """
    if device is not None:
        parse_device(device)
    found = collect(paths)
    records, findings = [], [*found.trouble]
    for facts in runs(found, device):
        if facts.has("isotype"):
            findings.append(_own(facts.documents[0]))
            continue
        record = effective_precision(facts)
        if record.roles or any(d.tool in MAIN or d.tool in ("accelerate", "deepspeed") for d in facts.documents):
            records.append(record)
        for function in RULES.values():
            findings += function(record)
    return Checked(_distinct(findings), records, found.files)


def _own(document: Document) -> Finding:
    return Finding(
        code="CF099",
        severity=Severity.NOTE,
        message="a run of Isotype, whose settings are checked by its own plan",
        place=Place(file=document.file),
        fix=f"isotype plan {document.file}",
    )


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Files shared by several runs say the same thing once."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        kept.setdefault((finding.code, str(finding.place), finding.message), finding)
    return list(kept.values())


def trouble_without_files(checked: Checked, paths: Iterable[str]) -> Finding | None:
    """A note when nothing was recognised: silence would look like a clean bill."""
    if checked.records or checked.findings:
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


MAIN = ("hf", "simpletuner", "axolotl", "llamafactory", "torchtune", "torchtitan", "lightning", "kohya", "isotype", "script")


def _first_line(document: Document) -> int:
    return min((s.line or 0 for s in document.settings.values()), default=0)


def runs(found: Collection, device: str | None) -> list[Facts]:
    """One Facts for each main document (a trainer's arguments) with the documents next to it; further documents are separate runs."""
    made: list[Facts] = []
    used: set[int] = set()
    mains = [(folder, d) for folder, d in found.documents if d.tool in MAIN]
    for folder, main in mains:
        own_launcher = [
            d for _, d in found.documents if d.attributes.get("launcher") and d.file == main.file and _first_line(d) == _first_line(main)
        ]
        values = [s.value for d in (main, *own_launcher) for s in d.settings.values() if isinstance(s.value, str)]
        referenced = {os.path.basename(value) for value in values if re.search(r"\.(?:json|ya?ml)$", value)}
        together = [main]
        by_tool: dict[str, list[Document]] = {}
        for other_folder, other in found.documents:
            if other.tool in MAIN:
                continue
            if other.attributes.get("reader") == "python" and other.file != main.file and other_folder != folder:
                continue  # a program elsewhere in the tree
            if (
                os.path.basename(other.file) in referenced
                or other_folder == folder
                or other_folder in folder.parents
                or folder in other_folder.parents
            ):
                by_tool.setdefault(other.tool, []).append(other)
        for tool, candidates in by_tool.items():
            named = [d for d in candidates if os.path.basename(d.file) in referenced]
            same_file = [d for d in candidates if d.file == main.file]
            beside = [d for d in candidates if os.path.dirname(d.file) == os.path.dirname(main.file)]
            chosen = named or same_file or beside or candidates
            if tool == "accelerate" and own_launcher:  # its options win over its file's
                together += own_launcher
                used |= {id(d) for d in own_launcher}
                chosen = named or [d for d in beside if not d.attributes.get("launcher")]
            several_fit = tool in ("env", "code") or (tool == "checkpoint" and len({os.path.dirname(d.file) for d in chosen}) == 1)
            if named or len(chosen) == 1 or several_fit:
                together += chosen
                used |= {id(d) for d in chosen}
        made.append(Facts(together, device))
    left = [(folder, d) for folder, d in found.documents if d.tool not in MAIN and id(d) not in used]
    by_folder: dict[Path, list[Document]] = {}
    for folder, document in left:
        if document.tool not in ("env", "code", "checkpoint") or not mains:
            by_folder.setdefault(folder, []).append(document)
    for documents in by_folder.values():
        counts: dict[str, int] = {}
        for document in documents:
            counts[document.tool] = counts.get(document.tool, 0) + 1
        alone = [d for d in documents if counts[d.tool] > 1 and d.tool in ("deepspeed", "accelerate", "model")]
        rest = [d for d in documents if d not in alone]
        made += [Facts([d], device) for d in alone]
        if rest:
            made.append(Facts(rest, device))
    return made
