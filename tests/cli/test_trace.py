"""`isotype doctor trace`: scripts with arguments, functions of a file, JSON on stdout only, exit statuses, one-line errors."""

import json
from pathlib import Path

import pytest

from tests.commands import isotype

FAULTY = """
import os, sys, torch, torch.nn as nn
print("said by the program")
def run():
    os.system("echo said by a child")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    model(torch.randn(2, 4))
def fine():
    return nn.Linear(4, 4)(torch.randn(2, 4)).dtype
if __name__ == "__main__":
    print(sys.argv[1:], __name__, os.path.basename(__file__))
    if "--fail" in sys.argv:
        run()
    if "--exit" in sys.argv:
        sys.exit(7)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(FAULTY)
    return file


def trace(*arguments):
    return isotype("doctor", "trace", *arguments)


def test_function_with_json_gives_one_object_on_stdout(program):
    done = trace(f"{program}:run", "--json")
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == ["TR001"]
    assert "said by the program" in done.stderr
    assert "said by a child" in done.stderr
    assert done.returncode == 1


def test_script_gets_its_own_arguments_and_main(program):
    done = trace(program, "--json", "--lr", "3")
    assert "['--json', '--lr', '3'] __main__ program.py" in done.stdout
    assert "no findings" in done.stdout
    assert done.returncode == 0


def test_failing_script_shows_its_traceback_without_our_frames(program):
    done = trace(program, "--fail")
    assert "program.py" in done.stderr
    assert "isotype/doctor" not in done.stderr
    assert done.stdout.count("TR001") == 2  # the heading and the page
    assert done.returncode == 1


def test_exit_status_of_the_script_is_kept(program):
    assert trace(program, "--exit").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "no such file"),
        (["nowhere.py:run"], "no such file"),
        (["{program}:nothing"], "no function 'nothing'"),
        (["{program}:run", "extra"], "takes no arguments"),
        (["--fail-on", "loud", "{program}:fine"], "expected error, warning or note"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(program, arguments, words):
    done = trace(*(a.format(program=program) for a in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith("isotype: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
