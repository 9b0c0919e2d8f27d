"""What reads the output of a run goes away, as `| head` does: the run goes on."""

from __future__ import annotations

import json
import subprocess

from tests.warm import interpreter


def test_a_run_goes_on_when_its_output_is_no_longer_read(configured, tmp_path):
    configured("run")
    command = [interpreter(), "-m", "isotype", "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline().startswith("run ")
        run.stdout.close()
        told = run.stderr.read()
    assert run.returncode == 0, told
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"
    assert told.count("warning   the output is no longer read") == 1
