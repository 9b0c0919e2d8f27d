"""Each known contradiction is found, at a line, and its repair is quiet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isotype.doctor.check import check
from isotype.finding import Finding, Severity

from .contradictions import CASES, Case


def run(folder: Path, files: dict[str, str], case: Case) -> list[Finding]:
    for name, text in files.items():
        (folder / name).write_text(text)
    return check([str(folder)], device=case.device).findings


@pytest.mark.parametrize("name", CASES)
def test_found_and_quiet_when_repaired(name: str, tmp_path: Path):
    case = CASES[name]
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    good.mkdir()
    found = [f for f in run(bad, case.bad, case) if f.code == case.code]
    assert found, [(f.code, f.message) for f in run(bad, case.bad, case)]
    assert all((f.severity == Severity.NOTE) == case.note for f in found)
    assert found[0].cause
    assert found[0].fix
    assert found[0].place.file is None or os.path.basename(found[0].place.file) in case.bad
    repaired = [f for f in run(good, case.good, case) if f.severity > Severity.NOTE or f.code == case.code]
    assert not repaired, [(f.code, f.severity, f.message) for f in repaired]
