"""What the operating system refuses a run: one error, the last good checkpoint in it, and the run goes on afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from isotype.errors import RunError, UsageError
from isotype.runs.folder import RunFolder
from isotype.runs.record import Metrics
from isotype.tasks.choose import train
from isotype.training.loop import Loop
from isotype.training.run import refused_by_disk


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "/proc/run"])
def test_an_impossible_folder_is_a_usage_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"run\.folder(.|\n)*--out FOLDER"), RunFolder(tmp_path / path).held():
        pass


@pytest.mark.full
def test_a_killed_process_releases_its_lock(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with RunFolder(tmp_path).held():
                os.write(writer, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.read(reader, 1)
    with pytest.raises(UsageError, match="in use by another run"), RunFolder(tmp_path).held():
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with RunFolder(tmp_path).held():
        pass


def test_a_disk_that_is_full_when_a_line_of_metrics_is_written(configured, tmp_path, monkeypatch):
    """Outside a checkpoint, and the record of the failure cannot be written either: the error is the first one."""
    plain, full = Metrics.write, []

    def write(self, **facts):
        if facts["step"] == 5:
            full.append(1)
            raise OSError(errno.ENOSPC, "No space left on device", str(self.file))
        plain(self, **facts)

    write_json = RunFolder.write_json

    def no_record(self, name, content):
        if full:
            raise RunError("could not write result.json", code="CK001")
        write_json(self, name, content)

    monkeypatch.setattr(Metrics, "write", write)
    monkeypatch.setattr(RunFolder, "write_json", no_record)
    with pytest.raises(RunError, match=r"CK001 .*metrics\.jsonl: No space left(.|\n)*saved .*step_4(.|\n)*then resume"):
        train(configured())
    monkeypatch.undo()
    assert train(configured(), resume=tmp_path / "run") == 0


@pytest.mark.full
def test_a_folder_that_vanishes_in_mid_run(configured, tmp_path, monkeypatch):
    plain = Loop._step

    def step(self, step):
        if step == 3:
            shutil.rmtree(self.folder.path)
        plain(self, step)

    monkeypatch.setattr(Loop, "_step", step)
    with pytest.raises(RunError, match=r"CK001 .*the run's folder is gone"):
        train(configured())


def test_disk_errors_elsewhere_are_usage_errors_and_other_errors_are_unchanged(tmp_path):
    elsewhere = refused_by_disk(OSError(errno.ENAMETOOLONG, "File name too long", "/data/" + "x" * 999), RunFolder(tmp_path))
    assert isinstance(elsewhere, UsageError)
    assert len(str(elsewhere)) < 300
    rust = refused_by_disk(Exception("I/O error: No space left on device (os error 28)"), RunFolder(tmp_path))
    assert isinstance(rust, RunError)
    mistake = KeyError("x")
    assert refused_by_disk(mistake, RunFolder(tmp_path)) is mistake


def test_a_report_that_cannot_be_made_is_a_warning(configured, tmp_path, monkeypatch, capsys):
    from isotype import report

    class Refused(KeyError):
        def __str__(self) -> str:
            return "report.html: cannot be written"

    monkeypatch.setattr(report, "write_report", lambda *a, **k: (_ for _ in ()).throw(Refused("")))
    assert train(configured(run={"report": True})) == 0
    assert "no report: report.html: cannot be written; isotype report" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"


@pytest.mark.full
def test_a_name_and_an_answer_that_the_terminal_cannot_write_end_no_run(workshop, tmp_path):
    name = os.fsdecode(b"caf\xe9.jsonl")
    try:
        shutil.copy(workshop.chats, tmp_path / name)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    settings = ["--model", str(workshop.base), "--data", name, "--out", "run", "--steps", "1", "run.samples=[é]"]
    ended = subprocess.run(
        [sys.executable, "-m", "isotype", "train", *settings], cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert rb"> \xe9" in ended.stdout
    assert rb"caf\udce9.jsonl" in ended.stdout
    assert rb"caf\udce9.jsonl" in (tmp_path / "run/report.html").read_bytes()
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"
