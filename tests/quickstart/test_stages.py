"""A stage ends when its time is over, but not before its least steps; the clock is the test's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isotype.quickstart import stages
from isotype.quickstart.stages import EndsInTime, Stage
from isotype.training.callbacks import Moment


@pytest.mark.parametrize(("step", "done"), [(0.1, 1000), (1.0, 101), (9.0, 40)], ids=["idle", "slow", "the least steps"])
def test_a_stage_ends_in_its_time(monkeypatch, step, done):
    now, clock = [0.0], EndsInTime(Stage("first", "", 1000, seconds=100.0, least=40))
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    for number in range(1, 1001):
        now[0] += step
        moment = Moment(number, 1000, {}, torch.nn.Identity(), Path())
        clock.on_step(moment)
        if moment._asked:
            break
    assert number == done
