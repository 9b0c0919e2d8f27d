"""benchmarks/gpu.py: a part that fails, hangs or is not reached stops nothing else, and a second run takes up what is left."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

import pytest

from tests.scripts import script
from tests.warm import interpreter

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu():
    return script(SCRIPT)


def started(gpu, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--device", "cpu", "--tiny"])
    return gpu.main()


def lines(folder, what="benchmarks"):
    return [json.loads(line) for line in (folder / f"{what}.jsonl").read_text().splitlines()]


def test_parts_end_alone_and_only_what_is_left_runs_again(gpu, monkeypatch, tmp_path, capsys):
    flag = tmp_path / "flag"
    parts = [
        gpu.Part("good", ("-c", "import sys, json; json.dump([1], open(sys.argv[2], 'w')); print('made')"), 30, rows=True),
        gpu.Part("bad", ("-c", f"import sys, pathlib; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 'no such kernel')"), 30),
        gpu.Part("hanging", ("-S", "-c", "import time; print('begun'); time.sleep(900)"), 4),
    ]
    monkeypatch.setattr(gpu, "benchmarks", lambda a: parts)
    out = tmp_path / "out"
    assert started(gpu, monkeypatch, "benchmarks", "--out", str(out)) == 1
    good, bad, hanging = lines(out)
    assert (good["rc"], good["rows"], good["output"]) == (0, [1], "made\n")
    assert (bad["rc"], bad["output"].strip()) == (1, "no such kernel")
    assert (hanging["rc"], hanging["output"]) == (124, "begun\n")
    flag.touch()
    assert started(gpu, monkeypatch, "benchmarks", "--out", str(out), "--part", "bad", "--part", "good") == 0
    assert [line["part"] for line in lines(out)] == ["good", "bad", "hanging", "bad"]
    assert "1 done, 1 before; failed: none" in capsys.readouterr().out


def decorated(file):
    """The names of the tests of a file with `@on_a_gpu` or `@pytest.mark.gpu`, read without importing anything."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if {ast.unparse(d) for d in f.decorator_list} & {"on_a_gpu", "pytest.mark.gpu"}}


@pytest.mark.full  # pytest imports every test of this repository
@pytest.mark.timeout(300)
def test_every_gpu_test_of_this_repository_is_in_one_part(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", interpreter())
    parts = gpu.tests(argparse.Namespace(out=tmp_path))
    listed = [line for part in parts for line in Path(part.command[-1][1:]).read_text().splitlines()]
    assert len(listed) == len(set(listed)) >= 139  # there were so many when this test was written
    marked = {(str(f.relative_to(gpu.ROOT)), name) for f in gpu.ROOT.rglob("tests/**/test_*.py") for name in decorated(f)}
    assert marked
    assert marked == {(line.split("::")[0], line.split("::")[-1].split("[")[0]) for line in listed}
    assert parts[0].name.startswith("kernels")
    assert parts[-1].name.startswith("runs")
