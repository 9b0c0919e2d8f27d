"""benchmarks/gpu.py: a part that fails, hangs or is not reached stops nothing else, and a second run takes up what is left."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def started(gpu, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
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


def test_a_part_that_does_not_fit_is_left_for_the_next_time(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "benchmarks", lambda a: [gpu.Part(name, ("-S", "-c", "pass"), 900) for name in "ab"])
    now = 0.0

    def part_takes_a_minute(part, limit, run=gpu.run):
        nonlocal now
        now += 60.0
        return run(part, 900)

    monkeypatch.setattr(gpu, "run", part_takes_a_minute)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    assert started(gpu, monkeypatch, "benchmarks", "--out", str(tmp_path), "--minutes", "1.5") == 3
    assert [line["part"] for line in lines(tmp_path)] == ["a"]


def test_every_test_that_needs_a_gpu_is_in_a_part(gpu):
    names = {part.name for part in gpu.tests(None)}
    marked = {f.stem for f in SCRIPT.parents[1].rglob("tests/**/test_*.py") if "@pytest.mark.gpu" in f.read_text()}
    assert names >= marked > set()
