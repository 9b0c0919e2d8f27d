"""Commands that must answer at once: no torch, no transformers, and little CPU time, measured
against this machine's own speed.
"""

import json
import subprocess
import sys
from functools import cache

import pytest

# times the import of the libraries below; the commands take 1.1 to 2 of them, and torch's import is
# ten times more
MOST = 4.0
ATTEMPTS = 8  # a busy machine only ever adds
YARDSTICK = """
import resource
import pydantic, rich.console, ruamel.yaml, typer
class Row(pydantic.BaseModel):
    count: int = 1
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
PROGRAM = """
import json, resource, runpy, sys
sys.argv = ["isotype", *json.loads(sys.argv[1])]
status = 0
try:
    runpy.run_module("isotype", run_name="__main__")
except SystemExit as end:
    status = end.code or 0
heavy = [m for m in ("torch", "transformers", "peft", "numpy", "datasets") if m in sys.modules]
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"status": status, "heavy": heavy, "seconds": used.ru_utime + used.ru_stime}), file=sys.stderr)
"""


@cache
def cpu_seconds() -> float:
    """What an answer may take here: the least of a few imports of the libraries that every command
    needs, MOST times.
    """
    runs = [
        subprocess.run(
            [sys.executable, "-c", YARDSTICK], capture_output=True, text=True, timeout=900
        )
        for _ in range(3)
    ]
    return MOST * min(float(ended.stdout) for ended in runs)


def run(*arguments: str, given: str = "", attempts: int = ATTEMPTS) -> dict:
    """The quickest of some attempts; the first that is quick enough ends them."""
    quickest: dict = {"seconds": float("inf")}
    for _ in range(attempts):
        command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
        ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=900)
        answer = json.loads(ended.stderr.splitlines()[-1]) | {
            "stdout": ended.stdout,
            "stderr": ended.stderr,
        }
        quickest = min(quickest, answer, key=lambda one: one["seconds"])
        if quickest["seconds"] < cpu_seconds():
            break
    return quickest


@pytest.mark.parametrize("arguments", [("--version",), ("init", "--schema"), ("train", "--help")])
def test_answers_at_once_without_torch(arguments):
    answer = run(*arguments)
    assert answer["status"] == 0, answer["stderr"]
    assert answer["stdout"]
    assert answer["heavy"] == []
    assert answer["seconds"] < cpu_seconds()


LOG = "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16\n"


@pytest.mark.parametrize(
    "arguments",
    [("doctor", "explain", "--json"), ("doctor", "explain", "CF001"), ("doctor", "FOLDER")],
)
def test_the_doctors_static_commands_too(arguments, tmp_path):
    (tmp_path / "x.py").write_text("x = 1\n")
    (tmp_path / "args.yaml").write_text("output_dir: o\nbf16: true\nfp16: true\nlogging_steps: 1\n")
    answer = run(*(str(tmp_path) if word == "FOLDER" else word for word in arguments), given=LOG)
    assert answer["status"] in (0, 1), answer["stderr"]
    assert answer["stdout"]
    assert answer["heavy"] == []
    assert answer["seconds"] < cpu_seconds()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "no-such.yaml"),
        ("train", "--resume", "nowhere"),
        ("train", "--model", "m", "--data", "none.jsonl"),
        ("eval", "nowhere"),
    ],
)
def test_mistakes_are_reported_before_torch_is_imported(arguments):
    answer = run(*arguments, attempts=1)
    assert answer["status"] == 2
    assert answer["heavy"] == []
    assert answer["stderr"].startswith("isotype: ")
    assert "Traceback" not in answer["stderr"]


# --- What an installation without extras can do: every command starts, and says which extra it
# misses.


WITHOUT_EXTRAS = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "peft", "triton", "click", "huggingface_hub", "datasets"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
sys.argv = ["isotype", *sys.argv[1:]]
from isotype.cli.app import main

main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--model", "m", "--data", "stdlib"],
        ["doctor", "conform", "x.py:f"],
        ["eval", ".", "stdlib"],
    ],
)
def test_a_missing_extra_is_named(arguments, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # a model's folder, as far as can be told
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install -e '" in done.stderr
    assert "[train]'" in done.stderr
    assert "Traceback" not in done.stderr
