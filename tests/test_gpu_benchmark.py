"""benchmarks/gpu.py: a part that fails, hangs or is not reached stops nothing else, and a second
run takes up what is left.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.scripts import script

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
        gpu.Part(
            "good",
            ("-c", "import sys, json; json.dump([1], open(sys.argv[2], 'w')); print('made')"),
            30,
            rows=True,
        ),
        gpu.Part(
            "bad",
            (
                "-c",
                f"import sys, pathlib; sys.exit(0 if pathlib.Path({str(flag)!r}).exists() else 'no such kernel')",
            ),
            30,
        ),
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
    assert (
        started(
            gpu, monkeypatch, "benchmarks", "--out", str(out), "--part", "bad", "--part", "good"
        )
        == 0
    )
    assert [line["part"] for line in lines(out)] == ["good", "bad", "hanging", "bad"]
    assert "1 done, 1 before; failed: none" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["all", "probe", "tests", "profile", "goal", "ops", "benchmarks"])
def test_without_a_gpu_every_command_says_so_in_one_line(gpu, monkeypatch, tmp_path, capsys, what):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "installed", lambda name: True)
    monkeypatch.delenv("ISOTYPE_GPU_TESTS_ON", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", what, "--out", str(tmp_path / "out")])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert re.fullmatch(
        rf"gpu.py {what}: no GPU \(torch .*\): .* runs .* here; --list says what there is\n",
        said.err,
    )
    assert not said.out
    assert not (tmp_path / "out").exists()


def test_all_runs_every_part_once_and_writes_one_table(gpu, monkeypatch, tmp_path, capsys):
    def op(peer, seconds):
        return {"case": "rope", "peer": peer, "times": [seconds], "peak": None, "failed": ""}

    step = {
        "model": "tiny",
        "base": "nf4",
        "tokens": 32,
        "recompute": "layers",
        "peak bytes": 2**30,
        "tokens/s": 100,
    }
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
        return [
            gpu.Part(name, ("-c", code, json.dumps([rows, said])), 30, rows=True)
            for name, rows, said in found
        ]

    for name, found in made.items():
        monkeypatch.setitem(gpu.COMMANDS, name, lambda a, found=found: parts(found))
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert started(gpu, monkeypatch, "all", "--out", str(tmp_path)) == 1
    ran = re.findall(r"^--- ([\w-]+)$", capsys.readouterr().out, re.M)
    assert ran == [
        "probe",
        "kernels-1",
        "profile-none",
        "qlora-8b-isotype",
        "qlora-8b-peft",
        "elementwise",
        "runs",
        "train",
    ]
    page = (tmp_path / "results.md").read_text()
    for row in (
        "| kernels-1 | 3 passed, 1 skipped | 0 |", "| tiny nf4 | 32 | isotype, layers | 100 | 1.50 | 1.00 | 1.00 |",
        "| profile-none | 32 | 9 | 7.5 | 6 |", "| rope | Liger | 2.000 | 2.00 |", "| tests | runs | 1 |",
    ):  # fmt: skip
        assert row in page
    # only what failed runs again
    assert started(gpu, monkeypatch, "all", "--out", str(tmp_path)) == 1
    assert re.findall(r"^--- ([\w-]+)$", capsys.readouterr().out, re.M) == ["runs"]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("goal.py", ["--who", "unsloth", "--model", "tiny"]),
        ("ops_gpu.py", ["--case", "unsloth", "--tiny"]),
        ("lora.py", ["--part", "model", "--rows", "Unsloth"]),
    ],
)
def test_a_part_that_misses_its_peer_is_not_done(gpu, monkeypatch, capsys, file, words):
    """Unsloth needs a GPU: the part runs again once it is there."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [file, *words, "--device", "cpu"])
    try:
        code = script(SCRIPT.with_name(file)).main()
    except SystemExit as left:
        code = left.code
    assert code == gpu.LEFT_OUT
    assert capsys.readouterr().out == "Unsloth left out: Unsloth needs a GPU\n"
