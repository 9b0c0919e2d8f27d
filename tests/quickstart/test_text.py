"""The quickstart with few of its steps, and stages that end in time whatever their parts
take.
"""

import json
from pathlib import Path

import pytest
import torch

from isotype.errors import UsageError
from isotype.quickstart import quickstart
from tests.api import STAGES, Moment, Stage, StopAtDeadline, stages, stdlib
from tests.api import quickstart_text as text
from tests.results import metrics

pytestmark = pytest.mark.timeout(3600)
STEP_SHARE = 0.006


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "quickstart"
    texts, pairs = stdlib.stdlib_text()[:200], stdlib.stdlib_pairs()[:120]
    # a twentieth of the set: most of the time goes into tokenising it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib, "stdlib_text", lambda: texts)
        patch.setattr(stdlib, "stdlib_pairs", lambda: pairs)
        assert quickstart(folder, step_share=STEP_SHARE) == 0
    return folder


def test_both_runs_are_ordinary_and_their_results_load_in_transformers_and_peft(made: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = metrics(made / "pretrain", "loss")
    assert len(losses) == 7
    assert losses[-1] < losses[0] - 0.3
    for stage in ("pretrain", "tune"):
        assert json.loads((made / stage / "result.json").read_text())["status"] == "done"
        assert "<svg" in (made / stage / "report.html").read_text()
    base = AutoModelForCausalLM.from_pretrained(made / "pretrain" / "model")
    model = PeftModel.from_pretrained(base, str(made / "tune" / "adapter"))
    tokenizer = AutoTokenizer.from_pretrained(made / "tune" / "adapter")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert (
        model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1]
        > ids["input_ids"].shape[1]
    )


def test_second_call_shows_the_result_without_training(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "tune" / "metrics.jsonl").stat().st_mtime_ns
    assert quickstart(made, step_share=STEP_SHARE, json_output=True) == 0
    assert (made / "tune" / "metrics.jsonl").stat().st_mtime_ns == before
    said = json.loads(capsys.readouterr().out)
    assert len(said["samples"]) == 4
    assert {"prompt", "before", "after", "reference"} == set(said["samples"][0])
    assert quickstart(made, step_share=STEP_SHARE) == 0
    shown = capsys.readouterr().out
    assert "loss of pretrain  " in shown
    assert f"> {said['samples'][0]['prompt']}" in shown
    assert str(made / "tune" / "report.html") in shown


def test_folders_with_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        quickstart(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        quickstart(tmp_path / "thesis.tex")


def test_a_stage_ends_in_its_time(monkeypatch):
    for step, done in ((0.1, 1000), (1.0, 101), (9.0, 40)):  # idle, slow, the least steps
        now, clock = 0.0, StopAtDeadline(Stage("first", "", 1000, seconds=100.0, min_steps=40))
        for number in range(1, 1001):
            now += step
            monkeypatch.setattr(stages.time, "monotonic", lambda now=now: now)
            moment = Moment(number, 1000, {}, torch.nn.Identity(), Path())
            clock.on_step(moment)
            if moment._stop_requests:
                break
        assert number == done


def test_a_shortened_run_shows_the_recorded_answers_of_a_full_run_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = text.read_full_run()
    known, *others = recorded["answers"]
    for stage in STAGES:
        (tmp_path / stage.name).mkdir()
        (tmp_path / stage.name / "plan.json").write_text(json.dumps({"total": stage.steps}))
    samples = [{"prompt": known, "before": "a", "after": "the the the", "reference": "b"}]
    curve = {stage.name: [(1, 7.0), (20, 6.0)] for stage in STAGES}
    summary = {"loss": curve, "samples": samples, "report": "report.html"}
    for steps, is_shortened in ((20, True), (400, False)):
        (tmp_path / "tune" / "result.json").write_text(json.dumps({"steps": steps}))
        text._print_summary(tmp_path, summary)
        shown = capsys.readouterr().out
        assert "after      the the the" in shown
        assert ("a recorded run of all 1600 steps, not this one" in shown) is is_shortened
        assert ("python -m benchmarks.quickstart_answers" in shown) is is_shortened
        for prompt in others:
            assert (f"  > {prompt}\n    full run " in shown) is is_shortened
        assert shown.count("    full run ") == is_shortened * len(recorded["answers"])


def test_stages_that_were_cut_short_say_by_how_much(tmp_path: Path) -> None:
    for name, steps in (("pretrain", 300), ("tune", 400)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(
            json.dumps({"total": 1200 if steps == 300 else 400})
        )
        (tmp_path / name / "result.json").write_text(json.dumps({"steps": steps}))
    lines = stages.describe_shortened(tmp_path, STAGES)
    assert len(lines) == 1
    assert "pretrain made 300 of 1200 steps (25%)" in lines[0]
    assert f"isotype train {tmp_path / 'pretrain.yaml'} run.folder=runs/pretrain" in lines[0]
