"""Realistic configurations in the tools' documented styles give no finding at all above a note, and each is understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.doctor.check import check
from isotype.finding import Severity

CLEAN = sorted(p for p in (Path(__file__).parent / "fixtures" / "clean").iterdir() if p.is_dir())


def test_there_are_at_least_forty():
    assert len(CLEAN) >= 40


@pytest.mark.parametrize("folder", CLEAN, ids=lambda p: p.name)
def test_no_false_alarm(folder: Path):
    checked = check([str(folder)])
    assert not [(f.code, f.message, str(f.place)) for f in checked.findings if f.severity > Severity.NOTE]
    if not folder.name.startswith(("isotype", "repository")):
        assert checked.records, "not recognised"
        assert all(
            record.value("compute") or record.value("trained")
            for record in checked.records
            if record.tool != "hf" or record.facts.has("hf")
        )
