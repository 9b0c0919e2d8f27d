"""A terminal that goes away: the run saves, and can be gone on with."""

import json
import os
import pty
import signal
import subprocess
import sys
from functools import partial

import pytest
from tests.api import Interrupt, RunConsole
from tests.warm import interpreter

from isotype.runs.checkpoint.store import CheckpointStore


def test_a_closed_terminal_has_the_run_save_and_stop(configured, tmp_path):
    configured("run", train={"steps": 10_000, "eval_every": 5_000})
    python = interpreter()
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may themselves be run under nohup
        os.execv(python, [python, "-m", "isotype", "train", str(tmp_path / "run.yaml")])
    shown = b""
    while b"tok/s" not in shown and (read := os.read(terminal, 4096)):
        shown += read
    os.close(terminal)  # the kernel sends SIGHUP; what is printed from here on fails
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "interrupted"
    assert CheckpointStore(tmp_path / "run/checkpoints").find_newest_intact() == (
        result["steps"],
        [],
    )


@pytest.fixture
def hang_up():
    """Sets what SIGHUP does here."""
    before = signal.getsignal(signal.SIGHUP)
    yield partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


def test_under_nohup_the_run_continues_after_sighup(hang_up):
    hang_up(signal.SIG_IGN)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.is_requested


def test_sigusr1_saves_and_stops_however_often_it_comes():
    """SLURM sends SIGUSR1 before the end of a job, to the launcher too. It ended the run at once."""
    with Interrupt() as interrupt:
        interrupt.begin()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert interrupt.is_requested
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


# --- What reads the output of a run goes away, as `| head` does: the run goes on.


def test_a_run_goes_on_when_its_output_is_no_longer_read(configured, tmp_path):
    configured("run")
    command = [interpreter(), "-m", "isotype", "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout.readline().startswith("run ")
        run.stdout.close()
        told = run.stderr.read()
    assert run.returncode == 0, told
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"
    assert told.count("warning   the output is no longer read") == 1


def test_a_run_goes_on_where_its_terminal_is_closed_and_no_signal_comes(monkeypatch, tmp_path):
    """As after `disown`, and in the moment before SIGHUP: the write fails with EIO. The error ended
    the run without a checkpoint, and Python's exit with status 120.
    """
    screen, terminal = pty.openpty()
    with open(terminal, "w") as output, open(os.dup(terminal), "w") as errors:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", errors)
        console = RunConsole()
        console.start_log(tmp_path / "log.txt")
        os.close(screen)
        for line in ("first", "second"):
            console.print_line(line)
        output.flush()  # as at exit
        errors.flush()
    assert (tmp_path / "log.txt").read_text().split() == ["first", "second"]
