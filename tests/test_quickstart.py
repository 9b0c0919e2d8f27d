"""The quickstart at a reduced size: both stages, resumed and repeated, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isotype import quickstart as quickstart_module
from isotype.data import stdlib
from isotype.errors import UsageError
from isotype.quickstart import Size, quickstart, tuning_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SMALL = Size(vocabulary=400, hidden=64, layers=1, window=64, pretrain_steps=12, tune_steps=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "quickstart"
    texts, pairs = stdlib.stdlib_text()[:400], stdlib.stdlib_pairs()[:300]
    with pytest.MonkeyPatch.context() as patch:  # a twentieth of the set: most of the time goes into tokenising it
        patch.setattr(stdlib, "stdlib_text", lambda: texts)
        patch.setattr(stdlib, "stdlib_pairs", lambda: pairs)
        assert quickstart(folder, size=SMALL) == 0
    return folder


def test_both_runs_are_whole_and_ordinary(made: Path) -> None:
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


def test_the_loss_of_pretraining_falls(made: Path) -> None:
    rows = [json.loads(line) for line in (made / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.3


def test_second_call_shows_the_result_without_training(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (made / "tune" / "metrics.jsonl").stat().st_mtime_ns
    assert quickstart(made, size=SMALL, json_output=True) == 0
    assert (made / "tune" / "metrics.jsonl").stat().st_mtime_ns == before
    said = json.loads(capsys.readouterr().out)
    assert len(said["samples"]) == 4
    assert {"prompt", "before", "after", "reference"} == set(said["samples"][0])
    assert quickstart(made, size=SMALL) == 0
    shown = capsys.readouterr().out
    assert "loss of pretrain" in shown
    assert f"> {said['samples'][0]['prompt']}" in shown
    assert str(made / "tune" / "report.html") in shown


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 1.0), (0.07, 1.0), (0.2, 0.511), (30.0, 0.1)])
def test_a_slow_machine_gets_fewer_steps(seconds: float, share: float) -> None:
    full, size = Size(), Size().shortened(seconds)
    assert size.pretrain_steps == pytest.approx(share * full.pretrain_steps, abs=1)
    assert size.tune_steps == pytest.approx(share * full.tune_steps, abs=1)


def test_tuning_takes_the_time_that_is_left() -> None:
    assert tuning_steps(200.0, 0.07) == 400
    assert tuning_steps(100.0, 0.37) == 193
    assert tuning_steps(-20.0, 0.37) == 40


def test_a_shortened_stage_has_pauses_at_its_start_and_its_end_alone() -> None:
    whole, short = quickstart_module._tune_yaml(Path("q"), Size()), quickstart_module._tune_yaml(Path("q"), Size(tune_steps=100))
    assert "eval_every: 80" in whole
    assert "sample_every: 200" in whole
    assert "eval_every: 50" in short
    assert "sample_every: 100" in short


def test_the_speed_is_measured_where_no_size_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, pairs = stdlib.stdlib_text()[:400], stdlib.stdlib_pairs()[:300]
    monkeypatch.setattr(stdlib, "stdlib_text", lambda: texts)
    monkeypatch.setattr(stdlib, "stdlib_pairs", lambda: pairs)
    monkeypatch.setattr(quickstart_module, "step_seconds", lambda config, rows, length: 30.0)
    said: list[str] = []
    quickstart_module._prepare(tmp_path / "q", None, said.append)
    assert "steps: 120" in (tmp_path / "q/pretrain.yaml").read_text()
    assert "steps: 40" in (tmp_path / "q/tune.yaml").read_text()
    assert any("shortened to 10% of their steps" in line for line in said)


def test_foreign_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="holds other files"):
        quickstart(tmp_path, size=SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        quickstart(tmp_path / "thesis.tex", size=SMALL)


def test_its_files_are_what_train_takes(made: Path) -> None:
    out = made.parent / "by_hand"
    command = [
        sys.executable,
        "-m",
        "isotype",
        "train",
        str(made / "tune.yaml"),
        f"run.folder={out}",
        "train.steps=2",
        "data.limit=20",
        "train.eval_every=2",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    assert (out / "adapter" / "adapter_config.json").is_file()
