"""Whole runs: what they leave behind, that they resume bit for bit, and that nothing that happens
to them loses a step.
"""

import json
import os
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.api import RunConsole
from tests.results import losses, metrics, read, same_result
from transformers import AutoModelForCausalLM

from isotype.config.load import load
from isotype.errors import RunError, UsageError
from isotype.report import write_report
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import train
from isotype.tasks.language.task import LanguageTask
from isotype.training import run as run_module


def result_of(folder: Path) -> dict:
    return read(folder, "result")


def test_a_run_writes_all_files_of_the_design(default_run, workshop):
    run = default_run
    left = {p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()}
    assert {
        "config.yaml",
        "resolved.yaml",
        "precision.json",
        "env.json",
        "data.json",
        "metrics.jsonl",
        "result.json",
    } <= left
    assert {
        "checkpoints/step_6/DONE",
        "samples/step_0.json",
        "samples/step_6.json",
        "adapter/adapter_config.json",
    } <= left
    result = result_of(run)
    assert result["status"] == "done"
    assert result["check"]["reloaded_loss"] == result["check"]["trained_loss"]
    shown = (run.parent / "printed.txt").read_text(encoding="utf-8")
    header, _, _ = shown.partition("\nstep 0/")
    labels = [line.split()[0] for line in header.splitlines() if not line.startswith(" ")]
    for label in ("model", "data", "learnt", "precision", "memory", "preflight", "details"):
        assert labels.count(label) == 1
    assert "layers." not in header, "paths of modules are details"
    answer = header.partition("<<<:")[2].partition(">>> ")[2].partition(" <<<")[0]
    assert answer in read(run, "examples")["examples"][0]["parts"][1]["text"]
    assert "layers.0.self_attn" in (run / "log.txt").read_text()
    checked = next(line for line in shown.splitlines() if line.startswith("checked"))
    assert result["check"]["rows"] == 1
    assert checked.endswith(f"on 1 evaluation row; {result['check']['tensors']} tensors equal")
    precision = json.loads((run / "precision.json").read_text())
    assert precision["observed"]["trainable"] == {"fp32": 28}
    assert precision["observed"]["loss"] == {"fp32": 1}
    assert precision["observed"]["save"] == {"fp32": 28}
    assert set(precision["observed"]["generate"]) == {"fp32"}
    assert {"norms", "reduce"} >= set(precision["unobserved"]) >= {"reduce"}
    assert set(precision["declared"]) - {"rounding", "loss_scaling"} <= set(
        precision["observed"]
    ) | set(precision["unobserved"])
    for role, total in precision["total"].items():
        seen, unseen = precision["observed"].get(role, {}), precision["unseen"].get(role, {})
        assert sum(seen.values()) + sum(unseen.values()) == total, role
    assert len(precision["observed_at"]) > 1, "steps are drawn besides the first"
    assert precision["violations"] == []
    assert all(0 < share <= 1 for share in metrics(run, "share_changed"))
    steps = [r for r in losses(run) if r[1] is not None]
    assert [s for s, *_ in steps] == [1, 2, 3, 4, 5, 6]
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workshop.base, dtype=torch.float32),
        str(run / "adapter"),
    )
    assert plain.peft_config["default"].r == 4


def test_a_finished_run_resumed_with_other_evaluation_rows_shows_no_loss_of_the_earlier_rows(
    run_copy, capsys
):
    run = run_copy
    assert result_of(run)["eval_loss"] is not None
    other_rows = load(
        run / "resolved.yaml",
        [f"run.folder={run}", "data.eval_split=0.3"],
        resolved=True,
        consent=True,
    )
    assert train(other_rows, resume=run) == 0
    result, printed = result_of(run), capsys.readouterr().out
    assert (result["eval_loss"], result["best_eval_loss"]) == (None, None)
    assert "the best is chosen anew" in printed
    assert "on 1 evaluation row;" in printed


def test_one_row_shows_a_wrong_scale_in_the_saved_adapter(configured, monkeypatch):
    save = LanguageTask.save

    def save_with_other_scale(self, model, folder, precision, **options):
        save(self, model, folder, precision, **options)
        file = folder / "adapter_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}))

    monkeypatch.setattr(LanguageTask, "save", save_with_other_scale)
    with pytest.raises(RunError, match="loaded into a fresh base its loss is") as error:
        train(configured(train={"steps": 2}, run={"sample_every": 0, "samples": []}))
    assert error.value.code == "SV001"


def test_weights_rounded_for_the_file_give_the_loaded_loss_exactly(configured, tmp_path):
    settings = {"adapter": {"kind": "none"}, "precision": {"preset": "fp32", "save": "model bf16"}}
    assert train(configured(train={"steps": 2}, **settings)) == 0
    check = result_of(tmp_path / "run")["check"]
    assert check["reloaded_loss"] == check["trained_loss"]


def test_the_trained_model_is_freed_before_its_result_is_loaded(configured, monkeypatch):
    modules, build, reload = [], LanguageTask.build_model, LanguageTask.reload

    def built(*args, **options):
        made = build(*args, **options)
        modules.extend(map(weakref.ref, made[0].modules()))
        return made

    def reloaded(*args, **options):
        assert not any(module() is not None for module in modules), "memory would have to hold both"
        return reload(*args, **options)

    monkeypatch.setattr(LanguageTask, "build_model", built)
    monkeypatch.setattr(LanguageTask, "reload", reloaded)
    assert train(configured(train={"steps": 2})) == 0
    assert modules


@pytest.mark.parametrize(
    ("precision", "text", "dtype", "grads"),
    [
        # the roles of bf16-lora
        pytest.param(
            {"preset": "bf16-mixed", "save": "model fp32"},
            "bf16-mixed save=fp32",
            torch.float32,
            "fp32",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"preset": "bf16-pure"},
            "bf16-pure",
            torch.bfloat16,
            "bf16",
            marks=pytest.mark.full,
        ),
        (
            {"preset": "bf16-pure", "grads": "fp32"},
            "bf16-pure grads=fp32",
            torch.bfloat16,
            "fp32",
        ),
    ],
)
def test_full_fine_tuning_saves_an_ordinary_model(
    configured, tmp_path, capsys, precision, text, dtype, grads
):
    assert train(configured(adapter={"kind": "none"}, precision=precision)) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype="auto")
    assert model.dtype == dtype
    observed = read(tmp_path / "run", "precision")
    assert (set(observed["observed"]["grads"]), observed["violations"]) == ({grads}, [])
    records = ["precision.json", "model/precision.json", "checkpoints/step_6/state.json"]
    assert {json.loads((tmp_path / "run" / file).read_text())["precision"] for file in records} == {
        text
    }
    assert f"precision {text}: trained " in capsys.readouterr().out
    assert f"precision {text}  (preset " in (tmp_path / "run/log.txt").read_text()


def ctrl_c_before(monkeypatch, owner, name, *, call=1, times=1):
    """SIGINT right before the `call`-th call of a function, `times` over."""
    whole, calls = getattr(owner, name), []

    def interrupted(*given, **named):
        calls.append(1)
        for _ in range(times if len(calls) == call else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, interrupted)


# the preflight samples and collates once before the loop does
@pytest.mark.parametrize(
    ("stage", "call"), [pytest.param("evaluate", 2, marks=pytest.mark.full), ("collate", 3)]
)
def test_ctrl_c_saves_and_prints_the_resume_command(
    default_run, configured, tmp_path, capsys, monkeypatch, stage, call
):
    previous = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        ctrl_c_before(patched, LanguageTask, stage, call=call)
        assert train(configured("stopped")) == 130
    assert signal.getsignal(signal.SIGINT) is previous
    assert result_of(tmp_path / "stopped")["status"] == "interrupted"
    assert "--resume" in capsys.readouterr().out
    assert train(configured("stopped"), resume=tmp_path / "stopped") == 0
    same_result(default_run, tmp_path / "stopped")


@pytest.mark.parametrize("stage", ["prepare", "preflight"])
def test_ctrl_c_before_step_1_stops_at_once_and_removes_the_folder(
    configured, tmp_path, capsys, monkeypatch, stage
):
    with monkeypatch.context() as patched:
        ctrl_c_before(patched, run_module, stage)
        assert train(configured()) == 130
    assert "interrupted before step 1: nothing was begun" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_passed_over_written_again_and_never_in_the_way_of_a_whole_one(
    configured, tmp_path, capsys
):
    """Without evaluations no checkpoint is the best one, which is written anyway; with keep: 1 a
    later folder must not count.
    """
    sections = {
        "data": {"eval_split": 0.0},
        "train": {"schedule": "constant", "steps": 2},
        "run": {"save_every": 2, "keep": 1},
    }
    assert train(configured(**sections)) == 0
    run = tmp_path / "run"
    (run / "checkpoints/step_2").rename(run / "checkpoints/step_20")
    os.truncate(run / "checkpoints/step_20/tensors.safetensors", 50)
    assert train(configured(**sections), resume=run) == 0
    out = capsys.readouterr().out
    assert "step_20 is damaged" in out
    assert "no whole checkpoint: starting from the beginning" in out
    assert CheckpointStore(run / "checkpoints").find_newest_intact()[0] == 2
    assert not (run / "checkpoints/step_20").exists()
    shutil.copytree(run / "checkpoints/step_2", run / "checkpoints/step_4")
    (run / "checkpoints/step_4/state.json").unlink()
    longer = sections | {"train": sections["train"] | {"steps": 4}}
    assert train(configured(**longer), resume=run) == 0
    assert CheckpointStore(run / "checkpoints").find_newest_intact() == (4, [])


def test_an_edited_file_of_settings_is_neither_taken_nor_ignored_in_silence(
    configured, tmp_path, capsys
):
    run = tmp_path / "run"
    assert train(configured(train={"schedule": "constant"})) == 0
    resolved = (run / "resolved.yaml").read_text()
    assert train(load(run / "resolved.yaml", ["train.steps=8"], resolved=True), resume=run) == 0
    said = capsys.readouterr().out.split("resume ")[-2]
    assert "note " not in said
    assert "changed   train.steps: 6 -> 8" in said
    assert result_of(run)["steps"] == 8
    before = (run / "resolved.yaml").read_text()
    with pytest.raises(UsageError, match=r"train\.steps: 4, and the run has made 8 steps"):
        train(load(run / "resolved.yaml", ["train.steps=4"], resolved=True), resume=run)
    assert (run / "resolved.yaml").read_text() == before
    assert result_of(run)["steps"] == 8, "a refused resume changes no result"
    for before, after, key in (
        ("preset: fp32", "preset: bf16-lora", r"precision\.preset"),
        ("dropout: 0.0", "dropout: 0.5", r"adapter\.dropout"),
    ):
        assert before in resolved
        (run / "resolved.yaml").write_text(
            (run / "resolved.yaml").read_text().replace(before, after, 1)
        )
        with pytest.raises(UsageError, match=key):
            train(load(run / "resolved.yaml", ["train.steps=9"], resolved=True), resume=run)
        assert (
            f"resolved.yaml was edited by hand: {key.replace(chr(92), '')}"
            in capsys.readouterr().out
        )
        (run / "resolved.yaml").write_text(
            (run / "resolved.yaml").read_text().replace(after, before, 1)
        )


def test_one_folder_holds_one_run(default_run, configured):
    with pytest.raises(UsageError, match=r"has a run already(.|\n)*--resume"):
        train(configured(run={"folder": str(default_run)}))


def test_early_stopping_keeps_the_best_and_a_run_that_it_ended_stays_ended(
    configured, tmp_path, capsys
):
    sections = {
        "steps": 40,
        "learning_rate": 1.0,
        "schedule": "constant",
        "eval_every": 1,
        "patience": 3,
    }
    assert train(configured(train=sections, run={"sample_every": 0, "samples": []})) == 0
    run, result = tmp_path / "run", result_of(tmp_path / "run")
    assert result["steps"] < 40
    assert result["of_step"] == result["best_step"] != result["steps"]

    def kept():
        return (run / "metrics.jsonl").read_bytes(), (
            run / "adapter/adapter_model.safetensors"
        ).read_bytes()

    before = kept()
    assert (
        train(configured(train=sections, run={"sample_every": 0, "samples": []}), resume=run) == 0
    )
    said = f"resume    from step {result['steps']}, where early stopping ended the run: train.patience=6 continues"
    assert said in capsys.readouterr().out
    assert kept() == before
    assert result_of(run) == result


def test_the_end_of_a_run_says_which_weights_are_saved_and_on_which_rows(
    configured, tmp_path, capsys, subtests
):
    """With this rate and seed the loss falls by 0.03 in the first step, and rises by 0.11 in the
    second.
    """
    rates = {"learning_rate": 1.0, "schedule": "constant"}
    unstable = {"steps": 2, "seed": 1, "eval_every": 1, **rates}
    weights = {}
    for save in (None, "best"):
        folder = tmp_path / str(save)
        run = {
            "folder": str(folder),
            "sample_every": 0,
            "samples": [],
            **({} if save is None else {"save": save}),
        }
        assert train(configured(train=unstable, run=run)) == 0
        result = result_of(folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        evaluations = {
            row["step"]: row["eval_loss"]
            for row in map(json.loads, lines)
            if row.get("event") == "evaluation"
        }
        output = capsys.readouterr().out
        with subtests.test(save):
            best = result["best_step"]
            assert best == 1
            assert result["steps"] == 2
            assert result["of_step"] == (best if save == "best" else 2)
            assert result["eval_loss"] == evaluations[result["of_step"]]
            assert (
                f"best evaluation loss {evaluations[best]:.4f} (held-out rows) at step {best}"
                in output
            )
            which = "the best evaluation" if save == "best" else "the last"
            loss = f"(evaluation loss {result['eval_loss']:.4f})"
            assert (
                f"saved     {folder / 'adapter'}: the weights of step {result['of_step']}, {which} {loss}"
                in output
            )
            assert (f"; run.save: best takes step {best}" in output) is (save != "best")
            assert "evaluation rows; " in output or "evaluation row; " in output
        weights[save] = (folder / "adapter/adapter_model.safetensors").read_bytes()
    assert weights[None] != weights["best"]


@pytest.mark.full
def test_with_patience_the_last_weights_are_saved_where_that_is_asked(configured, tmp_path):
    sections = {"steps": 40, "learning_rate": 1.0, "schedule": "constant", "eval_every": 1}
    run = {"save": "last", "sample_every": 0, "samples": []}
    assert train(configured(train={**sections, "patience": 2}, run=run)) == 0
    result = result_of(tmp_path / "run")
    assert result["of_step"] == result["steps"] < 40


def test_the_best_of_no_evaluations_is_refused(configured):
    with pytest.raises(UsageError, match=r"run\.save: best: there are no evaluation rows"):
        train(configured(data={"eval_split": 0}, run={"save": "best"}))


def test_a_run_that_goes_on_without_evaluations_ends_as_others_do(configured, run_copy, capsys):
    longer = configured(data={"eval_split": 0}, train={"steps": 8})
    assert train(replace(longer, consent=True), resume=run_copy) == 0
    assert result_of(run_copy)["status"] == "done"
    assert any(
        line.startswith("done      8 steps in") and "evaluation" not in line
        for line in capsys.readouterr().out.splitlines()
    )


def test_an_impossible_folder_is_a_usage_error(configured):
    for path in ("a\0b", "x" * 300, "/proc/run"):
        with pytest.raises(UsageError, match=r"run\.folder(.|\n)*--out FOLDER"):
            train(configured(run={"folder": path}))


# test_agents reads the same object from `isotype train --json`
@pytest.mark.full
def test_json_output_is_one_object_on_stdout(configured, capsys):
    assert train(configured(train={"steps": 2}), console=RunConsole(json_output=True)) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "done"
    assert "step 2/2" in captured.err


def test_a_random_model_gets_a_base_that_its_adapter_can_be_loaded_on(
    configured, tmp_path, workshop
):
    base = json.loads((workshop.base / "config.json").read_text())
    model = {"init": "random", "name": None, "config": base, "tokenizer": str(workshop.base)}
    assert train(configured(model=model, train={"steps": 2})) == 0
    run = tmp_path / "run"
    assert result_of(run)["base"] == str(run / "base")
    PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run / "base"), str(run / "adapter")
    )


# --- `data.eval` as sets by name: a loss for each, and early stopping by one of them.


def test_every_named_set_has_a_loss_and_one_of_them_decides(
    configured: Any, workshop: Any, tmp_path: Path, capsys: Any
) -> None:
    lines = Path(workshop.chats).read_text().splitlines(keepends=True)
    ours, other, odd = tmp_path / "train.jsonl", tmp_path / "more.jsonl", tmp_path / "odd.jsonl"
    ours.write_text("".join(lines[6:]))
    other.write_text("".join(lines[:6]))
    odd.write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": "Zqx Vjk Wyq! " * 4},
                ]
            }
        )
        + "\n"
    )
    data = {"train": str(ours), "eval": {"like": str(other), "odd": [str(odd)]}}
    settings = {
        "steps": 4,
        "eval_every": 2,
        "patience": 9,
        "stop_on": "like",
        "learning_rate": 0.01,
    }
    assert train(configured(data=data, train=settings)) == 0
    assert "(best of like)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row.get("event") == "evaluation"]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    for row in evaluations:
        low, high = sorted((row["eval_loss_like"], row["eval_loss_odd"]))
        assert low < row["eval_loss"] < high
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["best_eval_loss"] == min(row["eval_loss_like"] for row in evaluations)
    write_report(tmp_path / "run")
    page = (tmp_path / "run/report.html").read_text()
    assert "Evaluation loss, like" in page
    assert "Evaluation loss, odd" in page
