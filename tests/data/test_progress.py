"""The progress line: nothing where nobody looks, gone at the end where somebody does."""

from __future__ import annotations

import io
import sys

import pytest

from isotype.data import progress


def test_it_is_silent_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.watched(range(5), "reading")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_it_counts_on_a_terminal_when_work_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert len(list(progress.watched(range(50), "reading x.jsonl"))) == 50
    assert "reading x.jsonl:" in sys.stderr.getvalue()  # type: ignore[attr-defined]
