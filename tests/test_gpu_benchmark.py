"""benchmarks/gpu.py: a part that fails, hangs or is not reached stops nothing else, and a second run takes up what is left."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch

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
    monkeypatch.setitem(gpu.COMMANDS, "benchmarks", lambda a: parts)
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


@pytest.mark.parametrize("what", ["visit", "probe", "tests", "profile", "goal", "ops", "benchmarks"])
def test_without_a_gpu_every_command_says_so_in_one_line(gpu, monkeypatch, tmp_path, capsys, what):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "installed", lambda name: True)
    monkeypatch.delenv("ISOTYPE_GPU_TESTS_ON", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", what, "--out", str(tmp_path / "out")])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert re.fullmatch(rf"gpu.py {what}: no GPU \(torch .*\): .* runs .* here; --list says what there is\n", said.err)
    assert not said.out
    assert not (tmp_path / "out").exists()


def test_what_is_not_installed_is_named_before_anything_runs(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_package", "no_such.module"))
    monkeypatch.setattr(gpu, "installed", lambda name, own=gpu.installed: name != "triton" and own(name))
    assert started(gpu, monkeypatch, "tests", "--out", str(tmp_path / "out")) == 2
    assert "no_such.module triton (python -m pip install" in capsys.readouterr().err
    assert started(gpu, monkeypatch, "ops", "--out", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.startswith("gpu.py ops: not installed: no_such_package no_such.module (python -m pip install")


def test_a_visit_does_every_part_once_and_writes_a_table_of_what_it_found(gpu, monkeypatch, tmp_path, capsys):
    def op(peer, seconds):
        return {"case": "rope", "peer": peer, "times": [seconds], "peak": None, "failed": ""}

    step = {"model": "tiny", "base": "nf4", "tokens": 32, "recompute": "layers", "peak bytes": 2**30, "tokens/s": 100}
    made = {
        "probe": [("probe", {"device": {"name": "H100"}}, "")],
        "tests": [("kernels-1", None, "= 3 passed, 1 skipped in 2.0s ="), ("runs", None, "= 1 failed, 2 passed in 9.0s =")],
        "profile": [("profile-none", [{"tokens": 32, "ms": 9, "profile": "  7.5 ms in all\n", "ledger": {"ms": 6}}], "")],
        "goal": [(f"qlora-8b-{who}", [step | {"who": who, "ms": ms}], "") for who, ms in (("isotype", 10.0), ("peft", 15.0))],
        "ops": [("elementwise", {"rows": [op("isotype", 1e-3), op("Liger", 2e-3)]}, "")],
        "benchmarks": [("train", None, "")],
    }  # fmt: skip

    def parts(found):
        code = (
            "import sys, json; rows, said = json.loads(sys.argv[1]); json.dump(rows, open(sys.argv[3], 'w')); "
            "print(said); sys.exit('failed' in said)"
        )
        return [gpu.Part(name, ("-c", code, json.dumps([rows, said])), 30, rows=True) for name, rows, said in found]

    for name, found in made.items():
        monkeypatch.setitem(gpu.COMMANDS, name, lambda a, found=found: parts(found))
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert started(gpu, monkeypatch, "visit", "--out", str(tmp_path)) == 1
    ran = re.findall(r"^--- ([\w-]+)$", capsys.readouterr().out, re.M)
    assert ran == ["probe", "kernels-1", "profile-none", "qlora-8b-isotype", "qlora-8b-peft", "elementwise", "runs", "train"]
    page = (tmp_path / "visit.md").read_text()
    for row in (
        "| kernels-1 | 3 passed, 1 skipped | 0 |", "| tiny nf4 | 32 | isotype, layers | 100 | 1.50 | 1.00 | 1.00 |",
        "| profile-none | 32 | 9 | 7.5 | 6 |", "| rope | Liger | 2.000 | 2.00 |", "| tests | runs | 1 |",
    ):  # fmt: skip
        assert row in page
    # only what failed runs again
    assert started(gpu, monkeypatch, "visit", "--out", str(tmp_path)) == 1
    assert re.findall(r"^--- ([\w-]+)$", capsys.readouterr().out, re.M) == ["runs"]


@pytest.mark.parametrize("what", ["probe", "profile", "goal", "ops", "benchmarks"])
def test_the_parts_of_a_command_are_listed_without_a_gpu(gpu, monkeypatch, tmp_path, capsys, what):
    monkeypatch.setattr(sys, "argv", ["gpu.py", what, "--out", str(tmp_path), "--list"])
    assert gpu.main() == 0
    names = capsys.readouterr().out.split()
    parts = getattr(gpu, what)(argparse.Namespace(device="cuda", tiny=False))
    assert names == [part.name for part in parts]
    assert len(set(names)) == len(names)
    for part in parts:
        assert Path(part.command[0]).is_file()
        assert part.limit <= 300


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("what", "part"), [("probe", "probe"), ("profile", "profile-layers"), ("goal", "gemma-2b-unsloth")])
def test_probe_profile_and_goal_run_at_the_sizes_of_a_test(gpu, monkeypatch, tmp_path, what, part):
    monkeypatch.setattr(sys, "executable", interpreter())
    status = started(gpu, monkeypatch, what, "--out", str(tmp_path), "--part", part)
    (line,) = lines(tmp_path, what)
    assert status == (4 if what == "goal" else 0), line["output"]
    if what == "goal":
        assert "Unsloth left out: Unsloth needs a GPU" in line["output"]
    elif what == "probe":
        assert set(line["rows"]) == {"versions", "compilers", "device", "Triton's kernels", "attention", "products", "copies"}
    else:
        (row,) = line["rows"]
        assert row["tokens"] == 32
        assert row["tokens/s"] > 0
        assert "ms in all" in row["profile"]


def decorated(file):
    """The names of the tests of a file with `@on_a_gpu` or `@pytest.mark.gpu`, read without importing anything."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if {ast.unparse(d) for d in f.decorator_list} & {"on_a_gpu", "pytest.mark.gpu"}}


def test_collects_every_way_of_marking_a_gpu_test(gpu, tmp_path):
    (tmp_path / "tests/training").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-q"\nmarkers = ["gpu: needs one"]\n')
    (tmp_path / "tests/ways.py").write_text("import pytest\ndef on_a_gpu(test):\n    return pytest.mark.gpu(test)\n")
    (tmp_path / "tests/conftest.py").write_text("import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent))\n")
    (tmp_path / "tests/test_a.py").write_text(
        "import pytest\nfrom ways import on_a_gpu\n"
        "@on_a_gpu\n@pytest.mark.parametrize('x', ['a b', '[c]'])\ndef test_by_alias(x): pass\n"
        "@pytest.mark.gpu\ndef test_by_mark(): pass\ndef test_of_no_gpu(): pass\n"
    )
    (tmp_path / "tests/training/test_b.py").write_text("import pytest\npytestmark = pytest.mark.gpu\ndef test_by_module(): pass\n")
    (tmp_path / "tests/test_no_gpu.py").write_text("import no_such_module\n")
    ids, failed = gpu.collected(tmp_path)
    assert not failed
    assert ids == [
        "tests/test_a.py::test_by_alias[a b]",
        "tests/test_a.py::test_by_alias[[c]]",
        "tests/test_a.py::test_by_mark",
        "tests/training/test_b.py::test_by_module",
    ]
    assert gpu.shards(ids) == {"runs": ids[3:], "others": ids[:3]}
    (tmp_path / "tests/test_c.py").write_text("import no_such_module\n# needs pytest.mark.gpu\n")
    (tmp_path / "tests/test_d.py").write_text("import pytest\npytest.importorskip('no_such_kernels')\n# needs pytest.mark.gpu\n")
    assert gpu.collected(tmp_path) == (
        ids,
        {
            "tests/test_c.py": "ModuleNotFoundError: No module named 'no_such_module'",
            "tests/test_d.py": "Skipped: could not import 'no_such_kernels': No module named 'no_such_kernels'",
        },
    )


def test_a_part_that_misses_a_package_fails_nothing_and_runs_again(gpu, monkeypatch, tmp_path, capsys):
    parts = [gpu.Part("good", ("-c", ""), 30), gpu.Part("missing", ("-c", "import sys; sys.exit(4)"), 30)]
    monkeypatch.setitem(gpu.COMMANDS, "benchmarks", lambda a: parts)
    for _ in range(2):
        assert started(gpu, monkeypatch, "benchmarks", "--out", str(tmp_path)) == 4
    assert [line["part"] for line in lines(tmp_path)] == ["good", "missing", "missing"]
    assert "1 before; failed: none; left: none; left out for want of a package: ['missing']" in capsys.readouterr().out


def test_a_long_group_is_divided_and_no_test_is_lost(gpu):
    ids = [f"tests/lora/test_x.py::test[{i}]" for i in range(5)] + [f"tests/ops/test_kernels.py::test[{i}]" for i in range(50)]
    parts = gpu.shards(ids)
    assert list(parts) == ["kernels-1", "kernels-2", "kernels-3", "lora"]
    assert [i for part in parts.values() for i in part] == ids[5:] + ids[:5]
    assert max(map(len, parts.values())) <= gpu.SHARD


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
