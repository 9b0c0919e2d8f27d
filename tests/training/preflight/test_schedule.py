"""PF002: warm-up and the length of the run. PF021: a batch larger than the data."""

from __future__ import annotations

from isotype.training.preflight.static import more_rows_in_a_step_than_there_are, never_leaves_warmup


def test_a_warmup_as_long_as_the_run(subject):
    (finding,) = never_leaves_warmup(subject(train={"steps": 5, "warmup": 5, "learning_rate": 6e-4}))
    assert "5 steps of warm-up in a run of 5" in finding.message
    assert finding.observed == "at most 0.0005, at the last step"


def test_a_warmup_that_ends(subject):
    assert list(never_leaves_warmup(subject(train={"steps": 5, "warmup": 4}))) == []
    assert list(never_leaves_warmup(subject("default", train={"steps": 1}))) == []


def test_a_batch_larger_than_the_data(subject):
    (finding,) = more_rows_in_a_step_than_there_are(subject(train={"batch_size": 64, "accumulate": 2}, data={"eval_split": 0}))
    assert "a step takes 128 rows and there are 48: each comes 2.67 times in every step" in finding.message
    assert finding.fix == "train.batch_size x train.accumulate at most 48"


def test_a_batch_as_large_as_the_data(subject):
    assert list(more_rows_in_a_step_than_there_are(subject(train={"batch_size": 48}, data={"eval_split": 0}))) == []
