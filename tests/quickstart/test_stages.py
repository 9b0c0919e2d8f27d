"""The stages of a quickstart end in time whatever their parts take; the clock is the test's."""

from pathlib import Path

import pytest
import torch

from isotype.quickstart import stages
from isotype.quickstart.stages import EndsInTime, Stage, planned
from isotype.training.callbacks import Moment

STAGES = (Stage("first", "", 1000, least=40), Stage("second", "", 400, least=20))


def seconds_of(monkeypatch, *, before: float, start: float, end: float, step: float, later: float) -> tuple[float, list[int]]:
    """What the command takes, and the steps of each stage.

    start, end  of each stage
    step        seconds of a step at first; `later`: from the 50th step of the first stage on
    """
    now = [before]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    done, share = [], planned(STAGES, step)
    for i, stage in enumerate(STAGES):
        clock = EndsInTime(300.0, stage, (0.7, 1.0)[i], (3, 1)[i])
        now[0] += start
        total, number = max(1, round(share * stage.steps)), 0
        while number < total:
            number += 1
            now[0] += later if i or number > 50 else step
            moment = Moment(number, total, {}, torch.nn.Identity(), Path())
            clock.on_step(moment)
            if moment._asked:
                break
        now[0] += end
        if i == 0:
            share = max(0.1, min(share, clock.left_for(STAGES[1])))
        done.append(number)
    return now[0], done


@pytest.mark.parametrize(
    "parts",
    [
        {"before": 20.0, "start": 10.0, "end": 8.0, "step": 0.1, "later": 0.1},
        {"before": 20.0, "start": 15.0, "end": 15.0, "step": 0.2, "later": 2.0},
        {"before": 60.0, "start": 30.0, "end": 25.0, "step": 1.0, "later": 1.0},
    ],
    ids=["idle", "other programs begin", "busy from the start"],
)
def test_both_stages_end_within_the_time(monkeypatch, parts):
    seconds, (first, second) = seconds_of(monkeypatch, **parts)
    assert seconds <= 300.0 + 2 * parts["later"]  # the step that is being done when the time is over
    assert first >= 40
    assert second >= 20


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 1.0), (0.07, 1.0), (0.2, 0.64), (30.0, 0.1)])
def test_a_slow_machine_plans_fewer_steps(seconds, share):
    assert planned(STAGES, seconds) == pytest.approx(share, abs=0.01)
