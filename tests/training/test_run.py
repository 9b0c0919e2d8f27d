"""Whole runs: what they leave behind, that they resume bit for bit, and that nothing that happens to them loses a step."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isotype.checkpoint.store import CheckpointStore
from isotype.errors import RunError, UsageError
from isotype.training.run import train


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def trained_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "adapter/adapter_model.safetensors"
    return load_file(file if file.is_file() else folder / "model/model.safetensors")


def losses(folder: Path) -> list[tuple]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("eval_loss")) for r in rows]


def same_result(a: Path, b: Path) -> None:
    ours, theirs = trained_tensors(a), trained_tensors(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert losses(a) == losses(b)


def test_a_run_leaves_what_the_design_says(configured, tmp_path, workshop):
    assert train(configured()) == 0
    run = tmp_path / "run"
    left = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    assert {"config.yaml", "resolved.yaml", "precision.json", "env.json", "data.json", "metrics.jsonl", "result.json"} <= left
    assert {"checkpoints/step_6/DONE", "samples/step_0.json", "samples/step_6.json", "adapter/adapter_config.json"} <= left
    result = result_of(run)
    assert result["status"] == "done"
    assert result["check"]["reloaded_loss"] == result["check"]["trained_loss"]
    precision = json.loads((run / "precision.json").read_text())
    assert precision["observed"]["trainable"] == {"fp32": 28}
    assert precision["violations"] == []
    steps = [r for r in losses(run) if r[1] is not None]
    assert [s for s, *_ in steps] == [1, 2, 3, 4, 5, 6]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(workshop.base, dtype=torch.float32), str(run / "adapter"))
    assert plain.peft_config["default"].r == 4


@pytest.mark.parametrize("preset", ["fp32", "bf16-pure"])
def test_full_fine_tuning_saves_an_ordinary_model(configured, tmp_path, preset):
    assert train(configured(adapter={"kind": "none"}, precision={"preset": preset})) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype="auto")
    assert model.dtype == (torch.float32 if preset == "fp32" else torch.bfloat16)


def run_in_child(loaded, *, resume: Path | None = None, kill_after: float | None = None, sent: int = signal.SIGKILL) -> int:
    """Runs `train` in a fork of this process, which has everything imported; the status, negative when killed."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            with contextlib.redirect_stdout(None):
                status = train(loaded, resume=resume)
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, sent)
    _, how = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(how)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": {"preset": "fp32"}, "adapter": {"dropout": 0.1}},
        {"precision": {"preset": "bf16-pure"}, "adapter": {"kind": "none"}},
        {"precision": {"preset": "fp16-mixed"}, "adapter": {"kind": "none"}},
        {"precision": {"preset": "bf16-lora"}, "train": {"optimizer": "adamw8bit"}, "adapter": {"r": 64}},
    ],
    ids=["fp32-dropout", "bf16-pure", "fp16-mixed", "adamw8bit"],
)
def test_an_interrupted_run_ends_bit_identical(configured, tmp_path, settings):
    """The disturbed run is stopped by the count of its checkpoints, not by the clock, so that it is disturbed for certain."""
    assert train(configured("whole", **settings)) == 0
    loaded = configured("disturbed", **settings)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            original = CheckpointStore.save

            def save_then_die(self, checkpoint, *, best=False):
                original(self, checkpoint, best=best)
                if checkpoint.step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)

            CheckpointStore.save = save_then_die
            train(loaded)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert train(loaded, resume=tmp_path / "disturbed") == 0
    same_result(tmp_path / "whole", tmp_path / "disturbed")


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(configured, tmp_path):
    """Kill, resume, kill again; whenever a run survives to its end it must be the undisturbed one, and another starts."""
    short = {"train": {"steps": 12, "eval_every": 3}}
    started = time.perf_counter()
    assert run_in_child(configured("whole", **short)) == 0
    seconds = time.perf_counter() - started
    moments, kills, finished = random.Random(0), 0, 0
    loaded, run = configured("disturbed", **short), tmp_path / "disturbed"
    while kills < 20:
        resume = run if (run / "resolved.yaml").is_file() else None
        status = run_in_child(loaded, resume=resume, kill_after=moments.uniform(0.02, 0.9) * seconds)
        assert status in (0, -signal.SIGKILL)
        kills += status == -signal.SIGKILL
        if status == 0:
            same_result(tmp_path / "whole", run)
            shutil.rmtree(run)
            finished += 1
            assert finished < 60, "a kill must come sooner than that"
    assert run_in_child(loaded, resume=run if (run / "resolved.yaml").is_file() else None) == 0
    same_result(tmp_path / "whole", run)


def test_ctrl_c_saves_and_says_how_to_go_on(configured, tmp_path, capsys):
    assert train(configured("whole", train={"steps": 40, "eval_every": 40})) == 0
    loaded = configured("stopped", train={"steps": 40, "eval_every": 40})
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.35)
    status = train(loaded)
    assert status == 130
    assert signal.getsignal(signal.SIGINT) is previous
    assert result_of(tmp_path / "stopped")["status"] == "interrupted"
    assert "--resume" in capsys.readouterr().out
    assert train(loaded, resume=tmp_path / "stopped") == 0
    same_result(tmp_path / "whole", tmp_path / "stopped")


def test_a_damaged_checkpoint_is_passed_over(configured, tmp_path, capsys):
    assert train(configured()) == 0
    run = tmp_path / "run"
    for name in ("result.json",):
        (run / name).unlink()
    file = run / "checkpoints/step_6/tensors.safetensors"
    os.truncate(file, 50)
    assert train(configured(), resume=run) == 0
    out = capsys.readouterr().out
    assert "step_6 is damaged" in out
    assert "from step 4" in out


def test_resuming_with_another_precision_is_refused_and_a_longer_run_is_said(configured, tmp_path, capsys):
    assert train(configured(train={"schedule": "constant"})) == 0
    with pytest.raises(UsageError, match=r"precision\.preset"):
        train(configured(train={"schedule": "constant"}, precision={"preset": "bf16-lora"}), resume=tmp_path / "run")
    assert train(configured(train={"schedule": "constant", "steps": 8}), resume=tmp_path / "run") == 0
    assert "train.steps" in capsys.readouterr().out
    assert result_of(tmp_path / "run")["steps"] == 8


def test_one_folder_holds_one_run(configured, tmp_path):
    loaded = configured()
    assert train(loaded) == 0
    with pytest.raises(UsageError, match=r"has a run already(.|\n)*--resume"):
        train(loaded)


def test_two_runs_at_once_in_one_folder_are_refused(configured, tmp_path):
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="in use by another run"):
            train(configured())


def test_early_stopping_keeps_the_best(configured, tmp_path):
    assert train(configured(train={"steps": 40, "learning_rate": 1.0, "schedule": "constant", "eval_every": 1, "patience": 3})) == 0
    result = result_of(tmp_path / "run")
    assert result["steps"] < 40
    assert result["of_step"] == result["best_step"] != result["steps"]


def test_a_run_that_becomes_non_finite_names_the_last_good_checkpoint(configured, tmp_path, monkeypatch):
    from isotype.training import loop

    original = loop.Loop._step

    def poisoned(self, step):
        if step == 4:
            next(p for p in self.model.parameters() if p.requires_grad).data.fill_(float("nan"))
        original(self, step)

    monkeypatch.setattr(loop.Loop, "_step", poisoned)
    with pytest.raises(RunError, match=r"NF001 step 4(.|\n)*step_2"):
        train(configured())
    assert result_of(tmp_path / "run")["status"] == "failed"


def test_a_disk_that_fills_up_names_the_last_good_checkpoint(configured, tmp_path, monkeypatch):
    from isotype.checkpoint import folder

    original = folder.seal

    def full(aside):
        if aside.name == ".step_4.partial":
            raise OSError(28, "No space left on device")
        original(aside)

    monkeypatch.setattr(folder, "seal", full)
    with pytest.raises(RunError, match=r"CK001(.|\n)*step_4: No space left on device(.|\n)*saved(.|\n)*step_2"):
        train(configured())
    monkeypatch.undo()
    assert train(configured(), resume=tmp_path / "run") == 0


def test_json_output_is_one_object_on_stdout(configured, capsys):
    assert train(configured(), json_output=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "done"
    assert "step 6/6" in captured.err


def test_a_random_model_gets_a_base_that_its_adapter_can_be_loaded_on(configured, tmp_path, workshop):
    base = json.loads((workshop.base / "config.json").read_text())
    model = {"init": "random", "name": None, "config": base, "tokenizer": str(workshop.base)}
    assert train(configured(model=model)) == 0
    run = tmp_path / "run"
    assert result_of(run)["base"] == str(run / "base")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run / "base"), str(run / "adapter"))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_settings_of_the_loop_run(configured, tmp_path, schedule, checkpointing):
    train_section = {"schedule": schedule, "gradient_checkpointing": checkpointing, "accumulate": 2, "deterministic": True, "steps": 3}
    try:
        assert train(configured(train=train_section)) == 0
    finally:
        torch.use_deterministic_algorithms(False)
