"""`isotype report`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_without_matplotlib_the_page_is_written_and_the_extra_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.delitem(sys.modules, "isotype.report.picture", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"] or ["matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    said = CliRunner().invoke(build_app(), ["report", str(tmp_path)], catch_exceptions=False).stdout
    assert "not written: needs matplotlib" in said
    assert "pip install 'isotype[train]'" in said
    assert (tmp_path / "report.html").is_file()
    assert not (tmp_path / "report.png").exists()


def test_a_home_that_cannot_be_written_is_no_news(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    home = tmp_path / "metrics.jsonl" / "home"  # below a file there can be no folder
    away = {name: str(home) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")}
    environment = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"} | away
    command = [sys.executable, "-m", "isotype", "report", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "report.png").is_file()


def test_a_folder_without_a_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        CliRunner().invoke(build_app(), ["report", str(tmp_path)], catch_exceptions=False)
