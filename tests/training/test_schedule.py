"""The learning rate; the time left counts the pauses between steps, and samples keep to their share of the time."""

from itertools import pairwise

import pytest

from isotype.config.schema import TrainSection
from isotype.training.schedule import learning_rate


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
