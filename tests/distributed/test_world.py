"""What an exchange of many processes costs: real processes without a model, forks of one."""

import json
import subprocess

from tests.distributed.processes import environment
from tests.warm import ROOT, interpreter

VALUE_BYTES = 30_000


def test_the_cost_of_a_gather_does_not_grow_with_the_square_of_the_processes():
    """Every process read every answer from the store: 8.6 MB and 80 keys for a gather of 16."""
    command = [interpreter(), "benchmarks/world.py", "--processes", "16", "--json"]
    command += ["--value-bytes", str(VALUE_BYTES)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["first process"]
    assert report["gather"]["bytes"] < 8 * 16 * VALUE_BYTES
    for phase in ("sum", "gather", "first to all"):
        assert report[phase]["keys"] == 0, phase
