"""The stages of a quickstart end in time whatever their parts take; the clock is the test's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isotype.entry.stage import StageTime
from isotype.training.callbacks import Moment

STEPS = {"first": 1000, "second": 400}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def seconds_of(*, before: float, start: float, end: float, step: float, later: float, after: float = 0.0) -> tuple[float, list[int]]:
    """What the command takes, and the steps of each stage.

    start, end  of each stage
    step        seconds of a step at first; `later`: from the 50th step of the first stage on
    """
    clock = Clock()
    time = StageTime(300.0, share=0.6, least={"first": 40, "second": 20}, after=after / before, clock=clock)
    clock.now += before
    done = []
    for stage, total in STEPS.items():
        time.begin(stage)
        if stage == "second":
            total = min(total, max(20, int(time.left / later)))
        clock.now += start
        number = 0
        while number < total:
            number += 1
            clock.now += later if stage == "second" or number > 50 else step
            moment = Moment(number, total, {}, torch.nn.Identity(), Path())
            time.on_step(moment)
            if moment._asked:
                break
        assert (time.stopped_at == number) is bool(moment._asked)
        clock.now += end
        time.end()
        done.append(number)
    return clock.now + after, done


@pytest.mark.parametrize(
    "parts",
    [
        {"before": 20.0, "start": 10.0, "end": 8.0, "step": 0.1, "later": 0.1},
        {"before": 20.0, "start": 15.0, "end": 15.0, "step": 0.2, "later": 2.0},
        {"before": 60.0, "start": 30.0, "end": 25.0, "step": 1.0, "later": 1.0},
        {"before": 20.0, "start": 10.0, "end": 10.0, "step": 0.2, "later": 0.6, "after": 30.0},
    ],
    ids=["idle", "other programs begin", "busy from the start", "with a part after the stages"],
)
def test_both_stages_end_within_the_time(parts):
    seconds, (first, second) = seconds_of(**parts)
    assert seconds <= 300.0 + 2 * parts["later"]  # the step that is being done when the time is over
    assert first >= 40
    assert second >= 20


def test_an_idle_machine_does_every_step():
    _, steps = seconds_of(before=20.0, start=10.0, end=8.0, step=0.1, later=0.1)
    assert steps == [1000, 400]


def test_the_least_steps_are_done_on_any_machine():
    _, steps = seconds_of(before=200.0, start=100.0, end=100.0, step=9.0, later=9.0)
    assert steps == [40, 20]
