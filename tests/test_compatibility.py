"""docs/compatibility.md shows the results file, and a cell reports the check that fails."""

from pathlib import Path

import pytest
import torch

from tests import published
from tests.scripts import script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compatibility():
    return script(ROOT / "benchmarks/compatibility.py")


@pytest.fixture(scope="module")
def cells():
    return script(ROOT / "benchmarks/compatibility_cell.py")


VERSIONS = {"torch": "2.13", "transformers": "5.23", "peft": "0.21"}


def row_of(compatibility, family="llama", base="nf4", trainer="PEFT", versions=VERSIONS, **stages):
    row = {"family": family, "base": base, "trainer": trainer, "versions": versions}
    return {**row, **dict.fromkeys(compatibility.STAGES, "pass"), "export": "-", **stages}


def test_page_shows_results_file(compatibility):
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert page == compatibility.format_page(compatibility.read_rows())


def test_page_has_the_failing_line_of_the_last_run(compatibility):
    passed = row_of(compatibility)
    failed = row_of(compatibility, merge="fail: ValueError: a|b (peft/layer.py:7)")
    page = compatibility.format_page([passed, failed])
    assert "| `llama` | not run | fails: merge | not run |" in page
    assert "| nf4 | merge | ValueError: a\\|b (peft/layer.py:7) | `llama` |" in page
    assert "What fails" not in compatibility.format_page([failed, passed])


def test_what_is_not_the_trainers_fault_is_no_failure(compatibility):
    error = "relative error 1.0e-01, {} times the error of the dense bf16 model"
    rows = [
        row_of(compatibility, merge="requantised: " + error.format(20.5)),
        row_of(compatibility, "qwen2", merge="requantised: " + error.format(3.1)),
        row_of(compatibility, base="GPTQ", loads="unsupported: ImportError: x (y.py:1)"),
        row_of(compatibility, base="fp8", reference="fail: KeyError: z (w.py:1)"),
        row_of(compatibility, base="GGUF", loads="skipped: no such model"),
    ]
    page = compatibility.format_page(rows)
    line = next(line for line in page.splitlines() if line.startswith("| `llama` |"))
    assert line == (
        "| `llama` | not run | merge requantises | not run | reference failed | not loaded |"
        " not run | not run | not run | - |"
    )
    assert "3.1 to 20.5 times the error of the dense bf16 model | `llama`, `qwen2` |" in page
    assert "| GPTQ | loads | ImportError: x (y.py:1) | `llama` |" in page


def test_page_lists_the_cells_that_older_versions_change(compatibility):
    older = VERSIONS | {"transformers": "5.9"}  # a smaller version, and a larger text
    failed = {"gradient": "fail: TypeError: x (y.py:1)"}
    rows = [
        row_of(compatibility),
        row_of(compatibility, versions=older, **failed),
        row_of(compatibility, base="bf16"),
        row_of(compatibility, base="bf16", versions=older),
    ]
    page = compatibility.format_page(rows)
    assert "Versions: torch 2.13, transformers 5.23" in page
    assert "| PEFT | nf4 | fails: gradient | pass | `llama` |" in page
    assert page.count("| `llama` |") == 3  # the newest cells, the changed cell and its reason


def test_failure_keeps_its_line_and_does_not_stop_the_cell(cells):
    row = {}
    assert cells.run_stage(row, "loads", lambda: int("x")) is None
    assert row["loads"].startswith("fail: ValueError: invalid literal")
    assert "test_compatibility.py:" in row["loads"]
    assert cells.run_stage(row, "merge", lambda: 3) == 3
    with pytest.raises(ArithmeticError):
        cells.require_small_error(float("nan"), 0.01)

    def needs_a_package():
        raise ImportError("Loading an AWQ model requires gptqmodel")

    cells.run_stage(row, "loads", needs_a_package)
    assert row["loads"].startswith("unsupported: ImportError")


@pytest.mark.parametrize("form", ["fp8-block", "gptq", "awq", "nvfp4-ct", "mxfp4-ct"])
def test_reference_decodes_published_weights(cells, form):
    torch.manual_seed(0)
    tensors = published.packed(form, 64, 96)
    values = cells.decode_weight(tensors)
    assert values.shape == (64, 96)
    for o, i in [(0, 0), (63, 95), (33, 31), (31, 33), *torch.randint(0, 64, (60, 2)).tolist()]:
        expected = published.element(form, tensors, o, i)
        assert values[o, i].item() == pytest.approx(expected, rel=1e-12), (o, i)


def test_interrupted_run_continues(compatibility, tmp_path):
    class Counting(compatibility.Worker):
        def run(self, cell):
            if len(compatibility.read_rows(file)) == 1 and is_interrupted:
                raise KeyboardInterrupt
            return dict.fromkeys(compatibility.STAGES, "pass")

        def stop(self):
            stopped.append(True)

    compatibility.Worker, original = Counting, compatibility.Worker
    file, stopped, is_interrupted = tmp_path / "rows.jsonl", [], True
    cells = [("llama", "nf4", trainer) for trainer in compatibility.TRAINERS]
    try:
        with pytest.raises(KeyboardInterrupt):
            compatibility.run_missing(5, file, cells)
        assert stopped
        with file.open("a") as lines:  # the process ended while it wrote
            lines.write('{"family": "llama", "ba')
        assert len(compatibility.read_rows(file)) == 1
        is_interrupted = False
        compatibility.run_missing(5, file, cells)
    finally:
        compatibility.Worker = original
    rows = compatibility.read_rows(file)
    assert [row["trainer"] for row in rows] == list(compatibility.TRAINERS)


@pytest.mark.full
def test_cells_run_once_for_each_set_of_versions(compatibility, tmp_path):
    pytest.importorskip("bitsandbytes")
    compatibility.work = None  # the cells run in this process

    class Here(compatibility.Worker):
        def run(self, cell):
            return compatibility.run_cell(cell)

    compatibility.Worker = Here
    file = tmp_path / "rows.jsonl"
    cells = [
        ("llama", "nf4", "PEFT"),
        ("llama", "nf4", "Isotype"),
        ("qwen3_moe", "bf16", "TRL"),
        ("mixtral", "nf4", "Isotype"),
        ("gpt_oss", "mxfp4", "Isotype"),
        ("llama", "GPTQ", "Isotype"),
        ("qwen3_moe", "GGUF", "Isotype"),
    ]
    for _ in range(2):
        compatibility.run_missing(5, file, cells)
    peer, *others = compatibility.read_rows(file)
    assert peer["gradient"] == "pass"
    assert peer["merge"].startswith("requantised: relative error")
    assert len(others) == len(cells) - 1
    for row in others:
        assert {row[stage] for stage in compatibility.STAGES} <= {"pass", "-"}, row
        assert row["merge"] == "pass"
