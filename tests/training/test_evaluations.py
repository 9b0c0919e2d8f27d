"""How often a run evaluates by default, and on how many rows."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api import (
    EVALUATED_SHARE,
    MIN_EVALUATED_ROWS,
    MIN_EVALUATIONS,
    RunSchedule,
    RunState,
    Trial,
    describe_time,
)
from tests.results import same_result

from isotype.config.load import load
from isotype.config.schema import RunConfig
from isotype.tasks.choose import train
from isotype.tasks.language.task import LanguageTask
from isotype.training.task import MeanSizes


def schedule(*, steps: int, eval_rows: int, **sections) -> RunSchedule:
    settings = {"batch_size": 4, "steps": steps} | sections.pop("train", {})
    config = RunConfig.model_validate({"train": settings, **sections})
    return RunSchedule.from_config(config, rows=9_500, eval_rows=eval_rows)


def test_a_short_run_evaluates_a_part_of_the_rows():
    short = schedule(steps=200, eval_rows=500)
    assert short.describe_evaluation("row") == (
        "evaluation 4 times, 136 rows in all (the same 34 of 500 each time; once more all at the end)"
    )
    assert short.save_every == 20, "as often as before"


def test_a_long_run_evaluates_ten_times_all_rows():
    long = schedule(steps=10_000, eval_rows=500)
    assert (long.eval_every, long.eval_stride) == (1_000, 1)
    assert long.describe_evaluation("row") == "evaluation 11 times, 5,500 rows in all"


@given(steps=st.integers(1, 3_000), eval_rows=st.integers(1, 5_000), batch_size=st.integers(1, 16))
def test_evaluations_take_a_fifth_of_the_rows_trained(steps, eval_rows, batch_size):
    plan = schedule(steps=steps, eval_rows=eval_rows, train={"batch_size": batch_size})
    times = 1 + sum(plan.is_due(plan.eval_every, step) for step in range(1, steps + 1))
    assert times == plan.evaluations
    assert MIN_EVALUATIONS <= times <= 11
    assert plan.evaluated_rows >= min(eval_rows, MIN_EVALUATED_ROWS)
    budget = steps * batch_size / EVALUATED_SHARE
    least = MIN_EVALUATIONS * min(eval_rows, 2 * MIN_EVALUATED_ROWS)
    assert times * plan.evaluated_rows <= max(budget, least)


@pytest.mark.parametrize(
    "sections", [{"train": {"patience": 3}}, {"run": {"save": "best"}}], ids=["patience", "best"]
)
def test_evaluations_that_choose_stay_ten(sections):
    plan = schedule(steps=200, eval_rows=500, **sections)
    assert (plan.eval_every, plan.evaluations, plan.evaluated_rows) == (20, 11, 34)


def test_a_setting_of_the_user_stays_what_it_says():
    plan = schedule(steps=200, eval_rows=500, train={"eval_every": 50})
    assert (plan.eval_every, plan.eval_stride, plan.save_every) == (50, 1, 50)


SETTINGS = {"steps": 6, "batch_size": 4, "eval_every": None}


@pytest.fixture
def partial(configured, monkeypatch):
    """A run whose evaluations take a part of the rows, and the strides that it asked for."""
    monkeypatch.setattr("isotype.training.schedule.MIN_EVALUATED_ROWS", 1)
    strides = []
    evaluate = LanguageTask.evaluate

    def recorded(self, *args, stride=1, most=None, **options):
        if most is None:
            strides.append(stride)
        return evaluate(self, *args, stride=stride, most=most, **options)

    monkeypatch.setattr(LanguageTask, "evaluate", recorded)

    def make(folder="run", **sections):
        return configured(folder, train={**SETTINGS, **sections})

    return make, strides


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("event") == "evaluation"]


def test_evaluations_are_of_the_same_rows_and_the_last_one_also_of_all(partial, tmp_path, capsys):
    make, strides = partial
    assert train(make()) == 0
    printed = capsys.readouterr().out
    rows = rows_of(tmp_path / "run")
    *parts, whole = strides
    assert whole == 1
    assert len(set(parts)) == 1
    assert parts[0] > 1
    assert len(rows) == len(parts)
    assert len({row["eval_tokens"] for row in rows}) == 1, "the same rows"
    assert [("whole_eval_loss" in row) for row in rows] == [False] * (len(rows) - 1) + [True]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["best_eval_loss"] == min(row["eval_loss"] for row in rows)
    assert result["whole_eval_loss"] == rows[-1]["whole_eval_loss"] != rows[-1]["eval_loss"]
    assert math.isfinite(result["whole_eval_loss"])
    assert f"evaluation {len(rows)} times" in printed
    assert f"{result['whole_eval_loss']:.4f} on all rows" in printed


def test_a_resumed_run_with_partial_evaluations_is_bit_identical(partial, tmp_path):
    make, _ = partial
    assert train(make()) == 0
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run", resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_6")
    (resumed / "result.json").unlink()
    assert train(load(resumed / "resolved.yaml", [], resolved=True), resume=resumed) == 0
    assert rows_of(resumed) == rows_of(tmp_path / "run")
    same_result(tmp_path / "run", resumed)


@pytest.mark.full
@pytest.mark.parametrize("version", ["this", pytest.param("earlier", marks=pytest.mark.full)])
def test_a_run_of_all_rows_goes_on_with_all_rows(
    version, configured, partial, tmp_path, monkeypatch
):
    _, strides = partial
    take_checkpoint = RunState.take_checkpoint

    def without_stride(self):
        checkpoint = take_checkpoint(self)
        del checkpoint.state["progress"]["eval_stride"]
        return checkpoint

    with monkeypatch.context() as patch:
        if version == "earlier":
            patch.setattr(RunState, "take_checkpoint", without_stride)
        steps = {"steps": 6, "eval_every": 2, "schedule": "constant"}
        assert train(configured(train=steps)) == 0
    strides.clear()
    longer = configured(train={"steps": 8, "eval_every": None, "schedule": "constant"})
    assert train(longer, resume=tmp_path / "run") == 0
    assert set(strides) == {1}
    new_steps = [row["step"] for row in rows_of(tmp_path / "run") if row["step"] > 6]
    assert new_steps == ([7, 8] if version == "earlier" else [8])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["whole_eval_loss"] is None


# that a checkpoint keeps the part is in the test of a resumed run above
@pytest.mark.full
def test_a_longer_resume_keeps_the_part_of_the_rows(partial, tmp_path):
    make, strides = partial
    assert train(make(schedule="constant")) == 0
    before = set(strides) - {1}
    strides.clear()
    # a run that begins with so many steps evaluates more rows
    assert schedule(steps=20, eval_rows=5).eval_stride not in before
    assert train(make(schedule="constant", steps=20), resume=tmp_path / "run") == 0
    assert set(strides) - {1} == before


def test_the_header_names_the_time_of_steps_evaluations_samples_and_the_check(
    configured, monkeypatch, capsys
):
    monkeypatch.setattr("isotype.training.preflight.rehearsal.MIN_TIMED_BATCHES", 1)
    assert train(configured(train={"steps": 2, "batch_size": 4}, run={"sample_tokens": 8})) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("time "))
    for part in ("steps 0:", "evaluation 0:", "samples 0:", "check at the end 0:"):
        assert part in line
    assert "without samples" not in line


def test_the_time_of_a_run_is_the_sum_of_its_parts():
    plan = schedule(steps=200, eval_rows=500, run={"sample_every": 100})
    config = RunConfig(train={"batch_size": 4})
    task = SimpleNamespace(config=config, samples=4, mean_sizes=MeanSizes())
    text = describe_time(task, plan, Trial(batch_seconds=2.0, sample_seconds=10.0))
    assert text == (
        "about 9:51: steps 6:40, evaluation 2:39, samples 0:30, check at the end 0:02;"
        " a batch of the longest rows takes 2 s"
    )
    unknown = describe_time(task, plan, Trial(batch_seconds=2.0))
    assert unknown.startswith("about 9:21 without samples: steps 6:40, evaluation 2:39, check")
    task.mean_sizes = MeanSizes(training=0.5, evaluation=0.25)
    text = describe_time(task, plan, Trial(batch_seconds=2.0, sample_seconds=10.0))
    assert text.startswith("about 4:32: steps 3:20, evaluation 0:40, samples 0:30,")
    assert text.endswith("a batch of the longest rows takes 2 s, an average batch 50% of that")
