"""The learning rate; the time left counts the pauses between steps, and samples keep to their share of the time."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from isotype.config.schema import TrainSection
from isotype.training.schedule import FREE_SAMPLE_SECONDS, Pace, learning_rate, pauses_left, sample_seconds


def course(total=100, **train):
    section = TrainSection(learning_rate=1.0, **train)
    return [learning_rate(section, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_warms_up_then_starts_at_the_peak(schedule):
    rates = course(schedule=schedule, warmup=10)
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] < 1.0
    assert rates[10] == 1.0
    assert max(rates) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_learning_rate_ends_at_its_minimum(schedule):
    rates = course(schedule=schedule, min_learning_rate=0.1)
    assert 0.1 <= rates[-1] < 0.16
    assert all(a >= b for a, b in pairwise(rates[3:]))


def test_wsd_is_stable_then_decays():
    rates = course(schedule="wsd", warmup=0, decay=0.25)
    assert rates[:75] == [1.0] * 75
    assert rates[75] == 1.0
    assert rates[76] < 1.0


def test_a_run_of_one_step_has_its_full_learning_rate():
    assert course(total=1, warmup=0.03) == [1.0]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def timed(clock, pace, seconds):
    pace.start()
    clock.now += seconds
    pace.lap()


def paused(clock, pace, kind, seconds):
    with pace.pause(kind):
        clock.now += seconds


@pytest.mark.parametrize(("total", "every"), [(10, 3), (10, 5), (7, 10), (1, 1), (10, 0)])
def test_pauses_left_counts_the_remaining_pauses(total, every):
    for step in range(1, total + 1):
        due = [s for s in range(step, total + 1) if every and (s % every == 0 or s == total)]
        assert pauses_left(total, every, step) == len(due)


def test_eta_counts_evaluations_samples_and_checkpoints():
    clock = Clock()
    pace = Pace(clock)
    times = SimpleNamespace(total=10, eval_every=5, save_every=10, sample_every=5)
    paused(clock, pace, "evaluation", 3.0)
    paused(clock, pace, "samples", 7.0)
    timed(clock, pace, 60.0)  # the first step warms up
    assert pace.eta(times, 1) is None
    timed(clock, pace, 2.0)
    paused(clock, pace, "checkpoint", 4.0)
    assert pace.eta(times, 2) == 8 * 2.0 + 2 * 3.0 + 2 * 7.0 + 4.0
    assert pace.eta(times, 2, sample_seconds_left=1.0) == 8 * 2.0 + 2 * 3.0 + 1.0 + 4.0
    assert pace.eta(SimpleNamespace(total=10, eval_every=0, save_every=0, sample_every=0), 2) == 16.0


def test_samples_may_take_a_tenth_of_the_steps():
    assert sample_seconds(1000.0) == 100.0
    assert sample_seconds(5.0) == FREE_SAMPLE_SECONDS
