"""Single sections of the page, worked out from a run's files."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from isotype.report.page import differences, page, progress, status, tiles
from isotype.report.plots import loss_plot
from isotype.report.record import read_run
from isotype.report.verdicts import preflight
from isotype.report.words import plain
from isotype.report.write import render

from .runs import run_folder, step


def record(path: Path, **files):
    return read_run(run_folder(path, **files))


def test_learnt_tokens_are_marked_and_nothing_else(whole_run: Path) -> None:
    (row,) = page(read_run(whole_run))["examples"]
    assert row["parts"] == [("<|user|>why?", False), ("because<|end|>", True)]


def test_only_settings_that_differ_are_named_with_what_the_preset_has(tmp_path: Path) -> None:
    text = (
        "model:\n  name: m  # a.yaml:1\nadapter:\n  kind: none  # a.yaml:2\nprecision:\n  preset: bf16-pure  # a.yaml:3\n"
        "  # base: bf16  # preset\n  norms: bf16  # a.yaml:5\n  grads: fp32  # a.yaml:6\ntrain:\n  learning_rate: 2.0e-05  # default\n"
        "  steps: 7  # command line\n  unknown: 3  # a.yaml:9\nrun:\n  folder: x  # default\n"
    )
    found = {d.key: (d.value, d.usual, d.source) for d in differences(record(tmp_path / "run", resolved=text))}
    assert found == {"precision.norms": ("bf16", "fp32", "a.yaml:5"), "train.steps": ("7", "null", "command line")}


def test_status_and_progress_of_runs_that_are_not_at_their_end(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 8)], plan={"total": 20})
    (folder / ".lock").write_text("")
    assert status(read_run(folder)) == ("stopped without an end", "warn")
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(read_run(folder)) == ("running", "busy")
        assert progress(read_run(folder)) == (7, 20)
    assert progress(record(tmp_path / "run", result={"status": "done"})) is None


def test_the_preflight_has_a_mood_for_every_check(tmp_path: Path) -> None:
    found = [{"code": "PF001", "severity": "error"}, {"code": "PF002", "severity": "warning"}, "junk"]
    said = preflight(record(tmp_path / "run", preflight={"findings": found, "checks": {f"PF00{n}": "x" for n in (1, 2, 3)}, "skipped": 3}))
    assert said is not None
    assert [check["mood"] for check in said["checks"]] == ["bad", "warn", "good"]
    assert said["passed"] == 1


def test_sources_have_their_rows_and_weights(tmp_path: Path) -> None:
    files = [
        {"path": "a.jsonl", "format": "text", "why": "w", "rows": 1200, "kept": 1100},
        {"path": "b.jsonl", "format": "text", "rows": 5, "kept": 5},
    ]
    mix = [{"path": "a.jsonl", "weight": 3.0, "share": 0.75, "passes": 0.5}, "not a mapping", {"path": "b.jsonl", "weight": "?"}]
    found = page(record(tmp_path, data={"train": {"rows": 1105, "files": files}, "mix": mix}))["data"]["sides"][0]["files"]
    assert found[0]["counts"] == "1,200 rows, 1,100 here, weight 3: 75.0% of an epoch, each row 0.5 times"
    assert found[1]["counts"].startswith("5 rows")


def test_unobserved_roles_have_a_reason(tmp_path: Path) -> None:
    declared = {"reduce": {"value": "fp32"}, "loss": {"value": "fp32"}}
    made = record(tmp_path, precision={"declared": declared, "observed": {"loss": {"fp32": 1}}, "unobserved": {"reduce": "one process"}})
    rows = {row["role"]: row for row in page(made)["precision"]["rows"]}
    assert (rows["reduce"]["observed"], rows["reduce"]["unseen"], rows["reduce"]["mood"]) == ("not observed", "one process", "")
    assert rows["loss"]["mood"] == "good"


def test_resumes_are_marked_in_every_chart(tmp_path: Path) -> None:
    changes = [{"after_step": 4, "of": "rows", "what": "the rows are others"}, "x", 3]
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 9)], resumes={"steps": [4, "x", 4, 99], "changes": changes})
    made = page(read_run(folder))
    assert "<p>after step 4: the rows are others</p>" in render(read_run(folder))
    assert str(made["loss"][1]).count('class="resumed"') == 1
    assert ">resumed</text>" in str(made["loss"][1])
    assert "resumed at step 4" in made["loss"][0].described()


@pytest.mark.parametrize("steps", [8, 80])
def test_the_training_loss_on_top_is_the_one_that_its_curve_ends_at(tmp_path: Path, steps: int) -> None:
    made = record(tmp_path / "run", metrics=[step(n, loss=2.0 + (n % 3) / n) for n in range(1, steps + 1)])
    (tile,) = (tile for tile in tiles(made) if tile.label.startswith("training loss"))
    line = next(series for series in loss_plot(made).series if series.look == "line")
    assert line.name.startswith(tile.label)
    assert (tile.value, tile.note) == (plain(line.points[-1][1]), f"from {plain(line.points[0][1])} at step 1")
