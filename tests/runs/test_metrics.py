"""The lines of metrics.jsonl that a resumed run should find."""

from __future__ import annotations

import pytest

from isotype.runs.record import Metrics


@pytest.mark.parametrize(
    ("steps", "saved", "every", "missing"),
    [
        ([1, 2, 3], 3, 1, None),
        ([1, 2], 3, 1, 2),
        ([], 3, 10, 0),
        ([1, 10, 20], 25, 10, None),
        ([1, 10, 20], 25, 1, None),  # the part before wrote a line every ten steps
        ([1, 10], 25, 10, 10),
        ([1, 10, 20, 30], 25, 10, None),  # the checkpoint of step 30 was damaged
    ],
)
def test_missing_lines_are_found(tmp_path, steps, saved, every, missing):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write(step=0, event="evaluation", eval_loss=1.0)
    for step in steps:
        metrics.write(step=step, loss=1.0)
    assert metrics.missing_before(saved, every=every) == missing
    assert not metrics.removed
    metrics.file.unlink()
    assert metrics.removed
