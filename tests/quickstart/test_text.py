"""The quickstart at a hundredth of its steps, and stages that end in time whatever their parts take."""

import json
from pathlib import Path

import pytest
import torch

from isotype.data import stdlib
from isotype.errors import UsageError
from isotype.quickstart import quickstart, stages
from isotype.quickstart.stages import EndsInTime, Stage, planned
from isotype.training.callbacks import Moment
from tests.results import metrics

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "quickstart"
    texts, pairs = stdlib.stdlib_text()[:200], stdlib.stdlib_pairs()[:120]
    with pytest.MonkeyPatch.context() as patch:  # a twentieth of the set: most of the time goes into tokenising it
        patch.setattr(stdlib, "stdlib_text", lambda: texts)
        patch.setattr(stdlib, "stdlib_pairs", lambda: pairs)
        assert quickstart(folder, share=0.01) == 0
    return folder


def test_both_runs_are_ordinary_and_their_results_load_in_transformers_and_peft(made: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for stage in ("pretrain", "tune"):
        assert json.loads((made / stage / "result.json").read_text())["status"] == "done"
        assert "<svg" in (made / stage / "report.html").read_text()
    base = AutoModelForCausalLM.from_pretrained(made / "pretrain" / "model")
    model = PeftModel.from_pretrained(base, str(made / "tune" / "adapter"))
    tokenizer = AutoTokenizer.from_pretrained(made / "tune" / "adapter")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]


def test_loss_of_pretraining_falls(made: Path) -> None:
    losses = metrics(made / "pretrain", "loss")
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3


def test_second_call_shows_the_result_without_training(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (made / "tune" / "metrics.jsonl").stat().st_mtime_ns
    assert quickstart(made, share=0.01, json_output=True) == 0
    assert (made / "tune" / "metrics.jsonl").stat().st_mtime_ns == before
    said = json.loads(capsys.readouterr().out)
    assert len(said["samples"]) == 4
    assert {"prompt", "before", "after", "reference"} == set(said["samples"][0])
    assert quickstart(made, share=0.01) == 0
    shown = capsys.readouterr().out
    assert "loss of pretrain" in shown
    assert f"> {said['samples'][0]['prompt']}" in shown
    assert str(made / "tune" / "report.html") in shown


def test_folders_with_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        quickstart(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        quickstart(tmp_path / "thesis.tex")


# --- The stages of a quickstart end in time whatever their parts take; the clock is the test's.


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
