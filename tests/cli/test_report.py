"""`isotype report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError


def test_report_writes_the_page_and_prints_its_path(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    out = tmp_path / "page.html"
    ran = CliRunner().invoke(build_app(), ["report", str(tmp_path), "--out", str(out), "--json"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout) == {"report": str(out), "picture": str(tmp_path / "page.png")}
    assert "<svg" in out.read_text()
    said = CliRunner().invoke(build_app(), ["report", str(tmp_path)]).stdout
    assert str(tmp_path / "report.html") in said
    assert str(tmp_path / "report.png") in said


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        CliRunner().invoke(build_app(), ["report", str(tmp_path)], catch_exceptions=False)
