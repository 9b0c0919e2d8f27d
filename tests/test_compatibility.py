"""docs/compatibility.md shows the results file, and a cell reports the check that fails."""

from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compatibility():
    return script(ROOT / "benchmarks/compatibility.py")


def test_page_shows_results_file(compatibility):
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert page == compatibility.format_page(compatibility.read_rows())


def test_page_has_the_failing_line_of_the_last_run(compatibility):
    row = {"family": "llama", "base": "nf4", "trainer": "PEFT", "versions": {"torch": "1.0"}}
    stages = dict.fromkeys(compatibility.STAGES, "pass")
    failed = {**row, **stages, "merge": "fail: ValueError: a|b (peft/layer.py:7)"}
    page = compatibility.format_page([{**row, **stages}, failed])
    assert "| `llama` | not run | fails: merge | not run |" in page
    assert "| `llama` | nf4 | merge | ValueError: a\\|b (peft/layer.py:7) |" in page
    assert "What fails" not in compatibility.format_page([failed, {**row, **stages}])


def test_failure_keeps_its_line_and_does_not_stop_the_cell(compatibility):
    row = {}
    assert compatibility.run_stage(row, "loads", lambda: int("x")) is None
    assert row["loads"].startswith("fail: ValueError: invalid literal")
    assert "test_compatibility.py:" in row["loads"]
    assert compatibility.run_stage(row, "merge", lambda: 3) == 3
    with pytest.raises(ArithmeticError):
        compatibility.require_small_error(float("nan"), 0.01)


@pytest.mark.full
def test_cells_run_once_for_each_set_of_versions(compatibility, tmp_path):
    pytest.importorskip("bitsandbytes")
    compatibility.work = None  # the cells run in this process

    class Here(compatibility.Worker):
        def run(self, cell):
            return compatibility.run_cell(cell)

    compatibility.Worker = Here
    file = tmp_path / "rows.jsonl"
    cells = [("llama", "nf4", "PEFT"), ("llama", "nf4", "Isotype")]
    for _ in range(2):
        compatibility.run_missing(5, file, cells)
    peer, isotype = compatibility.read_rows(file)
    assert peer["gradient"] == "pass"
    assert peer["merge"].startswith("fail: relative error")
    assert {isotype[stage] for stage in compatibility.STAGES} == {"pass"}
