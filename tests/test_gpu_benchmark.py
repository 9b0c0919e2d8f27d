"""benchmarks/gpu.py: a part that fails, hangs or is not reached stops nothing else, and a second run takes up what is left."""

import json
import sys
from pathlib import Path

import pytest

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
