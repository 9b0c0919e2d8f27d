"""`isotype doctor run` runs a program as Python does, and prints under its traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from tests.api import RECORD, run_evidence, run_hook
from tests.warm import interpreter

PROGRAMS = Path(__file__).parent / "programs"
WITHOUT_TORCH = """
import pathlib, sys
print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__file__)
print("torch" in sys.modules, "typer" in sys.modules)
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "message":
    sys.exit("the end")
if sys.argv[1] == "raise":
    raise ValueError("expected dtype float")
"""


def run(
    *words: str, cwd: Path | None = None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *words], capture_output=True, text=True, cwd=cwd, timeout=300)


def run_with_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs python in a process that has torch imported."""
    return run(*words, python=interpreter())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(WITHOUT_TORCH)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(WITHOUT_TORCH)
    return tmp_path


@pytest.mark.parametrize("program", ["folder", "archive.zip"])
def test_folder_and_archive_run_as_python_runs_them(tmp_path, program):
    content = "import sys\nprint(__file__, __package__, __spec__.name, sys.path[0], __builtins__)\n"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(content)
    with ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", content)
    plain = run(program, cwd=tmp_path)
    explained = run("-m", "isotype.doctor", "run", program, cwd=tmp_path)
    assert plain.returncode == 0
    assert explained.stdout == plain.stdout


@pytest.mark.parametrize("action", ["end", "exit", "message", "raise"])
@pytest.mark.parametrize("program", [["train.py"], ["-m", "package.train"]])
@pytest.mark.parametrize("form", [["isotype.doctor", "run"], ["isotype", "doctor", "run"]])
def test_output_and_status_are_those_of_python(folder, program, action, form):
    plain = run(*program, action, cwd=folder)
    explained = run("-m", *form, *program, action, cwd=folder)
    assert explained.returncode == plain.returncode
    assert explained.stdout == plain.stdout
    assert explained.stdout.splitlines()[1] == "False False"
    # under -m Python's own traceback begins with two frames of runpy
    traceback = [line for line in plain.stderr.splitlines() if "<frozen runpy>" not in line]
    assert explained.stderr.splitlines() == traceback


def test_explanation_follows_the_traceback(tmp_path):
    program = str(PROGRAMS / "experts.py")
    plain = run(program)
    facts = tmp_path / "fault.json"
    explained = run("-m", "isotype", "doctor", "run", f"--json={facts}", program)
    assert explained.returncode == plain.returncode == 1
    assert explained.stderr.startswith(plain.stderr + "\nisotype doctor run\nerror RN008 ")
    content = json.loads(facts.read_text())
    assert content["finding"]["code"] == "RN008"
    assert content["evidence"]["operands"]["out"] == "fp32[4 8]"
    assert content["evidence"]["autocast"].startswith("on, bf16, since ")
    assert content["packages"]["torch"] == version("torch")
    assert {"kind", "name", "bf16"} <= set(content["devices"][0])


def test_a_gpu_that_lacks_the_dtype_is_named(monkeypatch, capsys):
    devices = [{"name": "Tesla T4", "bf16": "none"}, {"name": "a CPU", "bf16": "emulated"}]
    monkeypatch.setattr("isotype.environment.versions.detect_devices", lambda: devices)
    half = (torch.float16, False)
    for dtype, is_named in ((getattr(torch, "bfloat16"), True), half):  # noqa: B009
        with pytest.raises(RuntimeError) as failure:
            torch.ones(2, 2) @ torch.ones(2, 2, dtype=dtype)
        run_hook.explain_to_stderr(failure.value)
        text = capsys.readouterr().err
        assert ("Tesla T4 has no bf16: use fp16 or fp32 on it" in text) == is_named
        assert "a CPU" not in text


def test_import_of_the_hook_explains(tmp_path):
    program = tmp_path / "hooked.py"
    program.write_text("import isotype.hook\n" + (PROGRAMS / "experts.py").read_text())
    assert "error RN008 " in run_with_torch(str(program)).stderr


def test_unknown_program_and_option():
    for words, message in (
        (["missing.py"], "can't open missing.py"),
        (["--no-such-option", "x.py"], "no option --no-such-option"),
        (["-m", "no_such_module"], "no module no_such_module"),
        (["--json"], "--json needs a file"),
        (["--json", "no_folder/f.json", "x.py"], "--json no_folder/f.json: there is no folder"),
        (["."], "can't find a '__main__' module in ."),
    ):
        result = run("-m", "isotype", "doctor", "run", *words)
        assert result.returncode == 2
        assert message in result.stderr


def test_both_forms_of_the_command_have_the_same_help():
    for words in (["run", "--help"], ["explain", "RN017"]):
        helps = [run("-m", *form, *words) for form in (["isotype.doctor"], ["isotype", "doctor"])]
        assert [result.returncode for result in helps] == [0, 0]
        assert helps[0].stdout == helps[1].stdout


FAILING_THREAD = """
import threading, torch
thread = threading.Thread(target=lambda: torch.ones(2, 2) @ torch.ones(2, 2).half())
thread.start()
thread.join()
"""


def test_error_of_a_thread_is_explained(tmp_path):
    program = tmp_path / "threads.py"
    program.write_text(FAILING_THREAD)
    result = run_with_torch("-m", "isotype", "doctor", "run", str(program))
    assert result.returncode == 0
    assert "error RN017 " in result.stderr


def test_forward_line_of_an_error_in_backward(tmp_path):
    program = str(PROGRAMS / "backward_targets.py")
    forward_line = "loss = F.huber_loss(model(x).squeeze(-1), ratings)"
    command = ["-m", "isotype", "doctor", "run"]
    assert forward_line not in run_with_torch(*command, program).stderr
    result = run_with_torch(*command, "--forward-lines", program)
    assert forward_line in result.stderr


class Shell:
    """IPython's shell, as far as the extension uses it."""

    def set_custom_exc(self, kinds, handler):
        self.handler = handler

    def showtraceback(self, exception, tb_offset=None):
        print("traceback of", exception[0].__name__)


def make_halves():
    return [torch.ones(2).half() for _ in range(2)]


def test_notebook_extension_shows_both(capsys):
    shell = Shell()
    run_hook.install_in_notebook(shell)
    try:
        torch.dot(make_halves()[0], torch.ones(2))
    except RuntimeError as error:
        shell.handler(shell, type(error), error, error.__traceback__)
    finally:
        RECORD.remove()
    printed = capsys.readouterr()
    assert printed.out == "traceback of RuntimeError\n"
    assert "error RN017 " in printed.err
    assert "`torch.ones(2).half()` (tests/doctor/run/test_program.py:" in printed.err


@pytest.mark.parametrize(
    "failure",
    [
        "nn.Linear(8, 4).to(torch.bfloat16)(torch.ones(2, 7, dtype=torch.bfloat16))",
        "{'lr': 1}['dtype']",
        "__import__('numpy').zeros(2, dtype='float33')",
    ],
)
def test_other_errors_get_no_text(failure, tmp_path):
    program = tmp_path / "other.py"
    program.write_text(f"import torch\nfrom torch import nn\n{failure}\n")
    plain = run_with_torch(str(program))
    explained = run_with_torch("-m", "isotype", "doctor", "run", str(program))
    assert explained.returncode == plain.returncode == 1
    # the frames before the program's are those of the process with torch imported
    first_frame = f'  File "{program}"'
    assert (
        explained.stderr.partition(first_frame)[2] == plain.stderr.partition(first_frame)[2] != ""
    )


IN_PLACE = "modified by an inplace operation: [CPUBFloat16Type [8, 32]] is at version 2"
FOREIGN_ERRORS = (
    RuntimeError(f"one of the variables needed for gradient computation has been {IN_PLACE}"),
    RuntimeError("[torch.cuda.HalfTensor [8]], which is output 0 of AsStridedBackward0, is at"),
    RuntimeError("Input type (torch.cuda.HalfTensor) and weight type (torch.HalfTensor) should be"),
    TypeError("linear(): argument 'input' (position 1) must be Tensor, not float"),
    TypeError("zeros(): argument 'size' failed to unpack, found element of type float at pos 0"),
    TypeError("sum() received an invalid combination of arguments - got (str), but expected one"
              " of: * (*, torch.dtype dtype = None)"),
    TypeError("'float' object is not subscriptable"),
)  # fmt: skip


def test_messages_that_only_quote_types_are_not_about_dtypes():
    for error in FOREIGN_ERRORS:
        assert not run_evidence._mentions_dtype(error), error
    for message in (
        "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the",
        "Input type (CPUBFloat16Type) and weight type (torch.FloatTensor) should be the same",
        "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
    ):
        assert run_evidence._mentions_dtype(RuntimeError(message)), message
    lerp_message = "expected dtype c10::Half for `weight` but got dtype float"
    assert run_evidence._read_dtypes(lerp_message) == {torch.float16, torch.float32}
    memory = torch.zeros(4, dtype=torch.bfloat16)
    loss = (torch.ones(4, dtype=torch.bfloat16, requires_grad=True) * memory).sum()
    memory.add_(1)
    with pytest.raises(RuntimeError, match="BFloat16Type") as failure:
        loss.backward()
    assert run_evidence.collect_evidence(failure.value) is None


def test_cast_in_a_branch_that_did_not_run_is_not_named():
    explained = run_with_torch("-m", "isotype", "doctor", "run", str(PROGRAMS / "disabled_cast.py"))
    assert "error RN005 " in explained.stderr
    assert "x.to(torch.bfloat16)" not in explained.stderr
