"""The progress line: nothing where nobody looks, gone at the end where somebody does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isotype.data import progress


def test_a_log_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10_000, 8))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert list(progress.watched(range(20), "reading x.jsonl")) == [*range(20)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert said[0] == "reading x.jsonl: 4 rows, 0/s, 20%, 2:08 left"


def test_the_time_left_of_a_file_is_estimated_from_its_first_lines(tmp_path) -> None:
    from isotype.config.sources import SourceSpec
    from isotype.data.sources import source

    row = '{"prompt": "a?", "completion": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 30_000)
    spec = SourceSpec(name=str(tmp_path / "rows.jsonl"))
    assert abs(source(spec, needs_answer=True).about_rows - 30_000) < 30
    assert source(replace(spec, limit=7), needs_answer=True).about_rows == 7
    assert progress.progress("reading", 400, 1600, 10.0) == "reading: 400 rows, 40/s, 25%, 0:30 left"
