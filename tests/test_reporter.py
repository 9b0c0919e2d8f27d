"""What `make test` prints: a sign a test, and the name of every failed subtest."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
def test_all_pass(subtests):
    for number in range(9):
        with subtests.test(number=number):
            assert number < 9

def test_one_fails(subtests):
    for number in range(9):
        with subtests.test(number=number):
            assert number != 3
"""


def test_passed_subtests_print_nothing_and_failed_ones_are_named(tmp_path):
    (tmp_path / "test_numbers.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:isotype"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:xdist", "test_numbers.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    progress = re.match(r"[.uF]+", done.stdout)
    assert progress, done.stdout
    assert progress[0] == ".uF"
    assert "SUBFAILED(number=3) test_numbers.py::test_one_fails" in done.stdout
