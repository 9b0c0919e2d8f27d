"""Lines of metrics.jsonl: which of them a report and `ls` keep, and what a resume cuts off."""

import json
import math
import random
import tracemalloc

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from tests.api import LAST_ROWS, Metrics, read_last_rows, read_run, read_thinned_rows, runs_metrics
from tests.report.runs import run_folder, step


def long_run(path, count):
    """A run of so many steps, of which one has a peak, one no finite loss, and some evaluations."""
    draw = random.Random(0)
    with path.open("w") as file:
        for n in range(1, count + 1):
            loss = {count // 2: 99.0, count // 3: math.nan}.get(n, 2 + draw.random())
            scale = {"loss_scale": 8.0, "overflow": n % 10 == 0 or None}
            row = step(n, loss=loss, **scale)
            file.write(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")
            if n % 1000 == 0:
                file.write(json.dumps({"step": n, "eval_loss": 3 - n / count}) + "\n")
        file.write('{"step": 1, "lo')
    return path


def test_a_long_curve_is_thinned_while_it_is_read(tmp_path):
    """A report of 200,000 steps took 886 MB."""
    count = 40_000
    path = long_run(tmp_path / "metrics.jsonl", count)
    tracemalloc.start()
    with path.open("rb") as file:
        found = read_thinned_rows(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20
    steps = [row["step"] for row in found.rows if "loss" in row]
    assert 5_000 < len(steps) < 12_000
    assert steps == sorted(set(steps))
    assert {1, count // 2, count // 3, count} <= set(steps)
    assert sum("eval_loss" in row for row in found.rows) == count // 1000
    assert found.broken == [count + count // 1000 + 1]
    assert (found.overflow_count, found.scaled_count) == (count // 10, count)
    assert found.step_share == pytest.approx(len(steps) / count)


def test_a_short_curve_is_whole(tmp_path):
    path = long_run(tmp_path / "metrics.jsonl", 500)
    with path.open("rb") as file:
        assert [row["step"] for row in read_thinned_rows(file).rows] == list(range(1, 501))


def test_ls_parses_the_evaluations_and_the_last_lines_only(tmp_path, monkeypatch):
    """`ls` parsed every line and resolved.yaml: 500 runs took 6 s and more."""
    path = long_run(tmp_path / "metrics.jsonl", 5_000)
    parsed = 0
    parse_line = runs_metrics._parse_line

    def count_lines(line):
        nonlocal parsed
        parsed += 1
        return parse_line(line)

    monkeypatch.setattr(runs_metrics, "_parse_line", count_lines)
    with path.open("rb") as file:
        rows = read_last_rows(file).rows
    assert parsed == 5 + LAST_ROWS
    assert rows[-1]["step"] == 5_000
    plan = {"settings": {"model": {"name": "some/other"}, "data": {"train": "rows.jsonl"}}}
    folder = run_folder(tmp_path / "run", metrics=[step(1)], plan=plan, resolved="a: 1\n")
    monkeypatch.setattr("isotype.report.record.parse_settings", None)
    listed = CliRunner().invoke(build_app(), ["ls", str(folder), "--json"])
    (run,) = json.loads(listed.stdout)["runs"]
    assert (run["model"], run["data"], run["step"]) == ("other", "rows.jsonl", 1)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
def test_a_resume_cuts_the_lines_after_its_step(size, tmp_path, monkeypatch):
    monkeypatch.setattr(runs_metrics, "_BLOCK_BYTES", size)
    rows = [{"step": n // 2, "text": "\r" * (n % 5)} for n in range(30)]
    lines = [json.dumps(row) + "\n" for row in rows]
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for last in (-1, 0, 3, 14, 99):
        metrics.file.write_text("".join(lines) + '{"step": 3')
        metrics.cut_after(last)
        expected = [line for line, row in zip(lines, rows, strict=True) if row["step"] <= last]
        assert metrics.file.read_text() == "".join(expected)


def test_a_resume_reads_the_end_of_a_long_file_only(tmp_path, monkeypatch):
    path = long_run(tmp_path / "metrics.jsonl", 5_000)
    parsed = []
    parse_line = runs_metrics._parse_line
    monkeypatch.setattr(
        runs_metrics, "_parse_line", lambda line: parsed.append(line) or parse_line(line)
    )
    Metrics(path).cut_after(4_900)
    assert len(parsed) < 110
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 4_900


def test_every_row_is_read_where_all_are_asked_for(tmp_path):
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 30)])
    assert len(read_run(folder).metrics) == 29
