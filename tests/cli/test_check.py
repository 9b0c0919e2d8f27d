"""`isotype doctor check`, `explain`, `trace` and `conform` as their user runs them."""

import json
from pathlib import Path

import pytest

from isotype.errors import UsageError
from tests.commands import invoke, isotype


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "args.json").write_text(
        '{\n "output_dir": "o",\n "fp16": true,\n "bf16": true\n}\n'
    )
    return tmp_path


def test_the_table_and_the_finding(repository: Path):
    done = isotype("doctor", "check", "configs", cwd=repository)
    assert done.returncode == 1
    assert "will really do" in done.stdout
    assert "error CF001" in done.stdout
    assert "configs/args.json:3" in done.stdout


def test_json_has_findings_and_records(repository: Path):
    report = json.loads(isotype("doctor", "check", "configs", "--json", cwd=repository).stdout)
    (finding,) = report["findings"]
    assert finding["place"] == {"file": "configs/args.json", "line": 3, "symbol": "fp16"}
    assert finding["details"]["bf16"].startswith("true")
    assert report["records"][0]["roles"]["compute"]["value"] == "bf16"


def test_fail_on_warning_changes_the_exit_status_of_a_warning(repository: Path):
    (repository / "configs" / "args.json").write_text(
        '{"mixed_precision": "bf16", "downcast_bf16": true, "compute_environment": "x"}'
    )
    assert isotype("doctor", "check", "configs", cwd=repository).returncode == 0
    assert (
        isotype("doctor", "check", "configs", "--fail-on", "warning", cwd=repository).returncode
        == 1
    )


# --- `isotype doctor explain`: codes, files, standard input.


ERROR = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"


def test_standard_input_a_file_and_pasted_text_say_the_same(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text(ERROR + "\n")
    answers = [
        isotype("doctor", "explain", "--json", *given, input=ERROR)
        for given in ([], [log], [ERROR])
    ]
    findings = [json.loads(a.stdout)["findings"][0] for a in answers]
    assert {f["code"] for f in findings} == {"EX001"}
    assert [a.returncode for a in answers] == [1, 1, 1]
    assert findings[1]["place"] == {"file": str(log), "line": 1}


# --- `isotype doctor trace`: scripts with arguments, functions of a file, JSON on stdout only, exit
# statuses, one-line errors.


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


# --- `isotype doctor conform`.


OPS = """
import torch
from torch.autograd import Function

print("loading")

class Linear(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, d.t() @ x

def right(x, w):
    return x @ w.t()

def build():
    return Linear, (torch.ones(4, 8), torch.ones(6, 8))

def build_right():
    return right, (torch.ones(4, 8),), {"params": (torch.ones(6, 8),)}

def build_nothing():
    return 3

def build_failing():
    raise OSError("no disk")

def build_option():
    return right, (torch.ones(2),), {"refrence": right}
"""


@pytest.fixture
def ops(tmp_path) -> Path:
    file = tmp_path / "ops.py"
    file.write_text(OPS)
    return file


def test_conform_takes_build_by_default_and_right_code_exits_0(ops):
    faulty, right = (
        invoke("doctor", "conform", ops),
        invoke("doctor", "conform", f"{ops}:build_right"),
    )
    assert (faulty.exit_code, right.exit_code) == (1, 0), right.output
    assert "Linear.backward" in faulty.stdout
    assert "no findings" in right.stdout


def test_conform_finds_the_fault_of_each_real_case_and_passes_its_mend(shared):
    for case in sorted((shared / "cases").glob("amp-*")):
        found = invoke("doctor", "conform", case / "case.py", "--json")
        assert found.exit_code == 1, case.name
        expected = json.loads((case / "expect.json").read_text())
        named = [
            f
            for f in json.loads(found.stdout)["findings"]
            if f["place"].get("symbol") == expected["culprit"]
        ]
        assert any(abs(f["place"]["line"] - expected["culprit_line"]) <= 2 for f in named), (
            case.name
        )
        assert (
            invoke("doctor", "conform", case / "fixed.py", "--fail-on", "warning").exit_code == 0
        ), case.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nowhere"], "no such file"),
        (["check", ".", "--device", "abacus"], "abacus"),
        (["check", ".", "--fail-on", "x"], "--fail-on"),
        (["explain", "EX999"], "not a code"),
        (["explain", "missing.log"], "no such file"),
        (["explain", "."], "folder"),
        (["trace", "nowhere.py:run"], "no such file"),
        (["trace", "program.py:nothing"], "has no 'nothing'"),
        (["trace", "program.py:run", "extra"], "takes no arguments"),
        (["conform", "nowhere.py"], "nowhere.py: no such file"),
        (["conform", "no.such.module:x"], "no.such.module: no such file or module"),
        (["conform", "ops.py:biuld"], "has no 'biuld'"),
        (["conform", "ops.py:build_nothing"], "returned int"),
        (["conform", "ops.py:build_failing"], "OSError: no disk"),
        (["conform", "ops.py:build_option"], "the option 'refrence'"),
        (["conform", "ops.py:Linear"], "Linear needs inputs"),
    ],
)
def test_bad_usage_is_one_line(program, ops, monkeypatch, arguments, words):
    monkeypatch.chdir(program.parent)
    refused = invoke("doctor", *arguments).exception
    assert isinstance(refused, UsageError)
    assert words in str(refused)
    assert refused.exit_status == 2
