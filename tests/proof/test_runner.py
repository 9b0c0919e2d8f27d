"""`isotype proof` runs each part in its own process, stores what it found, and goes on later."""

import json
import subprocess

import pytest

from isotype.errors import UsageError
from tests.api import (
    PARTS,
    Part,
    Proof,
    Scale,
    card_line,
    describe_card,
    markdown_table,
    part_line,
    run_proof,
)
from tests.api import proof_runner as runner
from tests.commands import ask
from tests.warm import interpreter

TINY = Scale("cpu", is_tiny=True)
FAST = {"kernels": PARTS["kernels"]}


def prove(folder, **options):
    lines = []
    proof = run_proof(
        folder,
        card=describe_card("cpu"),
        scale=TINY,
        print_line=lines.append,
        **({"minutes": 5, "names": list(FAST)} | options),
    )
    return proof, lines


def test_results_are_stored_and_not_repeated(tmp_path):
    proof, lines = prove(tmp_path)
    assert proof.status("kernels") == "passed"
    assert len(lines) == 1
    assert lines[0].startswith("kernels       passed")
    stored = json.loads((tmp_path / "proof.json").read_text())
    assert stored["parts"]["kernels"]["rows"]
    checks = len(stored["parts"]["kernels"]["rows"])
    assert f"| {checks} of {checks} |" in (tmp_path / "proof.md").read_text()
    again, lines = prove(tmp_path)
    assert lines == []
    assert again.parts == proof.parts
    elsewhere, lines = prove(tmp_path / "other", previous=tmp_path)
    assert lines == []
    assert elsewhere.parts == proof.parts
    assert json.loads((tmp_path / "other/proof.json").read_text()) == stored


def test_a_part_that_fails_hangs_or_misses_a_package_stops_no_other(tmp_path, monkeypatch):
    parts = {
        "crash": Part("", "kernels:no_such_function", 1, 60),
        "hang": Part("", "kernels:check_ops", 1, 0),
        "package": Part("", "kernels:check_ops", 1, 60, ("no_such_package",)),
    }
    monkeypatch.setattr(runner, "PARTS", parts)
    monkeypatch.setattr(runner, "_run_part", limited(runner._run_part))
    proof, lines = prove(tmp_path, names=list(parts))
    assert [proof.status(name) for name in parts] == ["failed", "timed out", "package missing"]
    assert proof.failed == ["crash", "hang"]
    assert "no_such_package" in lines[2]
    assert len(json.loads((tmp_path / "proof.json").read_text())["parts"]) == 3


def test_a_kernel_that_was_found_wrong_still_runs_in_the_parts_that_check_kernels():
    assert runner._environment("kernels")["ISOTYPE_SKIP_KERNEL_CHECK"] == "1"
    assert "ISOTYPE_SKIP_KERNEL_CHECK" not in runner._environment("presets")


def limited(run_part):
    """No process starts in a thousandth of a second."""

    def run(name, part, scale, max_seconds):
        return run_part(name, part, scale, 0.001 if name == "hang" else max_seconds)

    return run


def test_parts_without_time_are_left(tmp_path):
    proof, lines = prove(tmp_path, minutes=0.001)
    assert proof.left == ["kernels"]
    assert lines == []


def test_results_of_another_card_are_refused(tmp_path):
    card = describe_card("cpu") | {"name": "another"}
    (tmp_path / "proof.json").write_text(json.dumps(Proof(card, True).to_json()))
    with pytest.raises(UsageError, match="another card, other versions or other sizes"):
        prove(tmp_path)
    (tmp_path / "proof.json").write_text("[1]")
    with pytest.raises(UsageError, match="not a result of isotype proof"):
        prove(tmp_path)


def test_an_error_names_no_folder():
    message = runner._last_line("Traceback\nOSError: /home/someone/models/a.bin: no such file")
    assert message == "OSError: a.bin: no such file"


def test_the_row_compares_with_peft():
    steps = {"preset": "bf16-lora", "layers": 4, "tokens": 2048}
    rows = [
        {"name": "isotype", "ms": 50.0, "peak_GiB": 4.0, **steps},
        {"name": "peft", "ms": 100.0, "peak_GiB": 8.0, **steps},
    ]
    card = describe_card("cpu")
    proof = Proof(card)
    proof.parts["speed-8b"] = {"status": "passed", "seconds": 1.0, "rows": rows, "error": ""}
    table = markdown_table(proof)
    assert "2.00 times PEFT's speed at 0.50 of its memory (4 layers, 2048 tokens, 50 ms)" in table
    assert "| not run |" in table
    assert card["name"] in card_line(card)


def test_without_a_gpu_one_line_says_so(monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"model.device: cuda: .*(no GPU|without CUDA)"):
        ask("proof")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="--part speed: there is no such part") as raised:
        ask("proof", "--device", "cpu", "--tiny", "--part", "speed")
    assert "kernels adapters" in raised.value.fix


@pytest.mark.full
def test_every_part_runs_on_a_cpu(tmp_path):
    proof, _ = prove(tmp_path, names=(), minutes=60)
    assert proof.failed == []
    assert proof.left == []
    statuses = {name: proof.status(name) for name in PARTS}
    assert statuses.pop("unsloth") in ("passed", "package missing")
    assert set(statuses.values()) == {"passed"}


def test_steps_of_other_libraries_are_described():
    row = {"name": "liger", "ms": 41.6, "peak_GiB": 12.34, "layers": 8, "losses": [1.0]}
    part = {"status": "passed", "seconds": 30.0, "rows": [row], "error": ""}
    assert "liger 42 ms, 12.3 GiB (8 layers)" in part_line("liger", part)


@pytest.mark.full
def test_liger_replaces_the_norms_of_the_measured_model():
    pytest.importorskip("liger_kernel")
    program = (
        "from isotype.proof.adapters import TINY_SIZES, build_llama\n"
        "from isotype.proof.speed import use_liger\n"
        "model = build_llama(TINY_SIZES, 'cpu')\n"
        "use_liger(model)\n"
        "print(model.model.norm.forward.__module__, model.model.layers[0].mlp.forward.__module__)\n"
    )
    done = subprocess.run(
        [interpreter(), "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.count("liger_kernel") == 2, done.stdout
