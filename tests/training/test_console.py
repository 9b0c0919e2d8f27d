"""The live line and the header in a narrow terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.api import RunConsole, fit_progress, format_progress, wrap_header

from isotype.training.task import MetricNames

NAMES = MetricNames(units="tokens", unit="tok", weight="supervised")
ROW = {
    "loss": 2.3141,
    "learning_rate": 2e-4,
    "grad_norm": 0.83,
    "share_changed": 0.98,
    "tokens_per_second": 3120.0,
    "memory_bytes": 1.2e9,
}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_live_line_keeps_memory_and_the_remaining_time(width: int) -> None:
    line = format_progress(12_345, 100_000, ROW, 5025.0, NAMES)
    assert len(line) > 80
    fitted = fit_progress(line, width)
    assert len(fitted) <= max(width, 62)
    assert fitted.startswith("step 12345/100000  loss 2.3141")
    assert "1.20 GB" in fitted
    assert fitted.endswith("ETA 1:23:45")
    if width == 200:
        assert fitted == line


def test_a_header_row_is_broken_between_words() -> None:
    text = "rms_norm  LlamaRMSNorm  base_model.model.model.layers.0.input_layernorm and 4 more"
    row = f"{'ops':<10}{text}\n{'':<10}second line"
    lines = wrap_header(row, 60).split("\n")
    assert " ".join(" ".join(lines).split()) == " ".join(row.split())
    assert lines[0].startswith("ops       rms_norm")
    assert all(line.startswith(" " * 10) for line in lines[1:])
    assert all(len(line) <= 60 for line in lines)
    assert wrap_header(row, 200) == row


@pytest.mark.parametrize("is_verbose", [False, True])
def test_details_of_the_header_are_shown_only_when_asked_for_and_always_logged(
    is_verbose: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = RunConsole(is_verbose=is_verbose)
    console.print_header([("model", "tiny")])
    console.print_details([("ops", "layer  rms_norm")], [("details", "in the log")])
    console.start_log(tmp_path / "log.txt")
    shown = capsys.readouterr().out
    assert "model     tiny" in shown
    assert ("layer  rms_norm" in shown) is is_verbose
    assert ("in the log" in shown) is not is_verbose
    assert (tmp_path / "log.txt").read_text() == "model     tiny\nops       layer  rms_norm\n"
