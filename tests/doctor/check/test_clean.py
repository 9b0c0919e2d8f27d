"""Realistic configurations in the tools' documented styles give no finding at all above a note, and
each is understood.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.finding import Severity
from tests.api import check_check as check

CLEAN = sorted(p for p in (Path(__file__).parent / "fixtures" / "clean").iterdir() if p.is_dir())


@pytest.mark.parametrize("folder", CLEAN, ids=lambda p: p.name)
def test_no_false_alarm(folder: Path):
    checked = check([str(folder)])
    assert not [
        (f.code, f.message, str(f.place)) for f in checked.findings if f.severity > Severity.NOTE
    ]
    if not folder.name.startswith("repository"):
        assert checked.records, "not recognised"
        assert all(
            record.value("compute") or record.value("trained")
            for record in checked.records
            if record.tool != "hf" or record.facts.has("hf")
        )


def test_an_unreadable_file_counts_only_if_it_is_about_training(tmp_path: Path):
    (tmp_path / "chart.yaml").write_text("a: {{ .Values.x }\n")
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}\n')
    assert [(f.code, f.place.line) for f in check([str(tmp_path)]).findings] == [("CF099", 2)]


def test_values_made_at_run_time_are_not_guessed(tmp_path: Path):
    (tmp_path / "t.py").write_text(
        "from trl import SFTConfig\nargs = SFTConfig(output_dir='o', bf16=supported(), fp16=not supported())\n"
    )
    assert not check([str(tmp_path)], device="t4").findings
