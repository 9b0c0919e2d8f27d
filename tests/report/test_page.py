"""Single sections of the page, worked out from a run's files."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import pytest

from isotype.report.page import differences, page, progress, status, tiles
from isotype.report.plots import loss_plot
from isotype.report.record import read_run
from isotype.report.verdicts import precision, preflight
from isotype.report.words import plain
from isotype.report.write import render

from .runs import run_folder, step, whole

CSS = Path(page.__code__.co_filename).with_name("report.css").read_text()


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


def test_settings_of_an_unknown_preset_are_compared_with_the_defaults(tmp_path: Path) -> None:
    text = "precision:\n  preset: [1]\ntrain:\n  clip: 2.0\n"
    assert [d.key for d in differences(record(tmp_path / "run", resolved=text))] == ["train.clip"]


def test_status_and_progress_of_runs_that_are_not_at_their_end(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 8)], plan={"total": 20})
    (folder / ".lock").write_text("")
    assert status(read_run(folder)) == ("stopped without an end", "warn")
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status(read_run(folder)) == ("running", "busy")
        assert progress(read_run(folder)) == (7, 20)
    assert progress(record(tmp_path / "run", result={"status": "done"})) is None


def test_a_reason_shared_by_most_roles_is_printed_once(tmp_path: Path) -> None:
    declared = {role: {"value": "bf16", "reason": "auto: this device"} for role in ("base", "compute", "generate")}
    declared["grads"] = {"value": "fp32", "reason": "run.yaml:9"}
    table = precision(record(tmp_path / "run", precision={"declared": declared}))
    assert table["why"] == "auto: this device"
    assert table["differing"]
    assert {row["observed"] for row in table["rows"]} == {"not observed"}


def test_the_preflight_has_a_mood_for_every_check(tmp_path: Path) -> None:
    found = [{"code": "PF001", "severity": "error"}, {"code": "PF002", "severity": "warning"}, "junk"]
    said = preflight(record(tmp_path / "run", preflight={"findings": found, "checks": {f"PF00{n}": "x" for n in (1, 2, 3)}, "skipped": 3}))
    assert said is not None
    assert [check["mood"] for check in said["checks"]] == ["bad", "warn", "good"]
    assert said["passed"] == 1


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_the_contrast_that_wcag_asks_for(dark: bool) -> None:
    """WCAG 2.1 AA: 4.5 for text, 3 for lines of charts, against what they stand on."""
    light, darker = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in CSS.split("@media (prefers-color-scheme: dark)")[:2]
    )
    colours = light | darker if dark else light
    text = [(ink, back) for ink in ("ink", "soft", "faint") for back in ("page", "card", "code")]
    text += [(mood, back) for mood in ("good", "warn", "bad") for back in ("card", f"{mood}-bg")]
    text += [("busy", "busy-bg"), ("ink", "mark"), ("soft", "mark"), ("c1", "card"), ("c2", "card"), ("good", "page")]
    low = {pair: round(ratio, 2) for pair in text if (ratio := contrast(colours[pair[0]], colours[pair[1]])) < 4.5}
    assert not low


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear))


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    assert len(render(read_run(whole(tmp_path / "run", steps=5000)))) < 400_000


def test_sources_have_their_rows_and_weights(tmp_path: Path) -> None:
    files = [
        {"path": "a.jsonl", "format": "text", "why": "w", "rows": 1200, "kept": 1100},
        {"path": "b.jsonl", "format": "text", "rows": 5, "kept": 5},
    ]
    mix = [{"path": "a.jsonl", "weight": 3.0, "share": 0.75, "passes": 0.5}, "not a mapping", {"path": "b.jsonl", "weight": "?"}]
    found = page(record(tmp_path, data={"train": {"rows": 1105, "files": files}, "mix": mix}))["data"]["sides"][0]["files"]
    assert found[0]["counts"] == "1,200 rows, 1,100 here, weight 3: 75.0% of an epoch, each row 0.5 times"
    assert found[1]["counts"].startswith("5 rows")


def test_places_that_cannot_be_observed_are_listed(tmp_path: Path) -> None:
    unobserved = {"reduce": "one process", "operator mine::op in layers.0": "its arithmetic is inside its own kernel"}
    made = record(tmp_path, precision={"declared": {}, "observed": {"loss": {"fp32": 1}}, "unobserved": unobserved})
    assert [p["place"] for p in precision(made)["places"]] == ["operator mine::op in layers.0"]


def test_unobserved_roles_have_a_reason(tmp_path: Path) -> None:
    declared = {"reduce": {"value": "fp32"}, "loss": {"value": "fp32"}}
    made = record(tmp_path, precision={"declared": declared, "observed": {"loss": {"fp32": 1}}, "unobserved": {"reduce": "one process"}})
    rows = {row["role"]: row for row in page(made)["precision"]["rows"]}
    assert (rows["reduce"]["observed"], rows["reduce"]["unseen"], rows["reduce"]["mood"]) == ("not observed", "one process", "")
    assert rows["loss"]["mood"] == "good"


def test_a_chart_that_never_changes_is_a_line_of_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(n, tokens_per_second=1000.0 + n) for n in range(1, 9)])
    made = page(read_run(folder))
    constants = {title: value for title, value, _ in made["constants"]}
    assert constants == {"Learning rate": "0.0001", "Share changed": "98%", "Peak memory": "1 GB"}
    assert {plot.title for plot, _ in made["figures"]} == {"Gradient norm", "Tokens per second"}


def test_resumes_are_marked_in_every_chart(tmp_path: Path) -> None:
    changes = [{"after_step": 4, "of": "rows", "what": "the rows are others"}, "x", 3]
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 9)], resumes={"steps": [4, "x", 4, 99], "changes": changes})
    made = page(read_run(folder))
    assert "<p>after step 4: the rows are others</p>" in render(read_run(folder))
    assert str(made["loss"][1]).count('class="resumed"') == 1
    assert ">resumed</text>" in str(made["loss"][1])
    assert "resumed at step 4" in made["loss"][0].described()


def test_an_axis_is_fitted_to_values_that_lie_close_together(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(n, tokens_per_second=3000.0 + n, grad_norm=1.0 * n) for n in range(1, 9)])
    low = {plot.key: plot.bounds[1][0] for plot, _ in page(read_run(folder))["figures"]}
    assert low["tokens_per_second"] > 2900
    assert low["grad_norm"] == 0


@pytest.mark.parametrize("steps", [8, 80])
def test_the_training_loss_on_top_is_the_one_that_its_curve_ends_at(tmp_path: Path, steps: int) -> None:
    made = record(tmp_path / "run", metrics=[step(n, loss=2.0 + (n % 3) / n) for n in range(1, steps + 1)])
    (tile,) = (tile for tile in tiles(made) if tile.label.startswith("training loss"))
    line = next(series for series in loss_plot(made).series if series.look == "line")
    assert line.name.startswith(tile.label)
    assert (tile.value, tile.note) == (plain(line.points[-1][1]), f"from {plain(line.points[0][1])} at step 1")


def test_a_quantised_base_is_shown_with_the_dtype_of_the_rest(tmp_path):
    declared = {"base": {"value": "nf4", "reason": "preset nf4-lora", "rest": "bf16"}}
    made = record(tmp_path, precision={"declared": declared, "observed": {"base": {"nf4": 35, "bf16": 12}}})
    row = precision(made)["rows"][0]
    assert (row["declared"], row["observed"]) == ("nf4 (rest bf16)", "35 nf4, 12 bf16")
