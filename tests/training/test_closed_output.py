"""What reads the output of a run goes away, as `| head` does: the run goes on."""

from __future__ import annotations

import json
import subprocess

import pytest
from tests.warm import interpreter


@pytest.mark.parametrize("errors", [subprocess.PIPE, subprocess.STDOUT], ids=["apart", "in the same pipe"])
def test_a_run_goes_on_when_its_output_is_no_longer_read(configured, tmp_path, errors):
    configured("run")
    command = [interpreter(), "-m", "isotype", "train", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("run ")
        run.stdout.close()
        told = run.stderr.read() if run.stderr else ""
    assert run.returncode == 0, told
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "done"
    warnings = [line for line in told.splitlines() if line.startswith("warning   the output is no longer read")]
    assert len(warnings) == (errors == subprocess.PIPE)
