"""PF002: warm-up and the length of the run."""

from __future__ import annotations

from isotype.training.preflight.schedule import never_leaves_warmup


def test_a_warmup_as_long_as_the_run(subject):
    (finding,) = never_leaves_warmup(subject(train={"steps": 5, "warmup": 5, "learning_rate": 6e-4}))
    assert "5 steps of warm-up in a run of 5" in finding.message
    assert finding.observed == "at most 0.0005, at the last step"


def test_a_warmup_that_ends(subject):
    assert list(never_leaves_warmup(subject(train={"steps": 5, "warmup": 4}))) == []
    assert list(never_leaves_warmup(subject("default", train={"steps": 1}))) == []
