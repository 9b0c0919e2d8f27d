"""Standard streams that the shell closed, or that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
# what a command would print and open, in place of the command
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pathlib import Path
import isotype.cli.app as app

def command():
    with open(Path.cwd() / "a.txt", "w") as file:
        assert file.fileno() > 2, file.fileno()
        assert not sys.stderr.isatty()
        print("words " * 100, flush=True)
        print("words", file=sys.stderr)

app.build_app = lambda: command
app.main()
"""


def shell(redirected: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" "$2" {redirected}', sys.executable, PROGRAM, SOURCE],
        capture_output=True, text=True, cwd=folder, timeout=900, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_left_out_and_no_file_takes_its_number(tmp_path: Path, closed: str) -> None:
    ended = shell(closed, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "a.txt").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    ended = shell("> /dev/full", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "isotype: could not write the output: No space left on device",
        "  fix       send it to a file that has room",
    ]
