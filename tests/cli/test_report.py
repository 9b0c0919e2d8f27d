"""`isotype report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError


def test_it_writes_the_page_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    out = tmp_path / "page.html"
    ran = CliRunner().invoke(build_app(), ["report", str(tmp_path), "--out", str(out), "--json"])
    assert ran.exit_code == 0
    assert json.loads(ran.stdout) == {"report": str(out)}
    assert "<svg" in out.read_text()
    assert str(tmp_path / "report.html") in CliRunner().invoke(build_app(), ["report", str(tmp_path)]).stdout


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        CliRunner().invoke(build_app(), ["report", str(tmp_path)], catch_exceptions=False)
