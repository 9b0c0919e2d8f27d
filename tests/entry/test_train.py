"""`isotype.train(...)` and the Run it returns, as a notebook would use them."""

import logging
import os
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from typer.testing import CliRunner

import isotype
from isotype.cli.app import build_app
from isotype.config.schema import TrainSection
from isotype.errors import RunError, UsageError
from tests.results import metrics, same_result


def settings(workshop, folder, **train):
    return {
        "model": workshop.base,
        "data": {"train": str(workshop.chats), "eval_split": 0.1, "max_length": 64},
        "adapter": {"r": 4},
        "precision": "fp32",
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 1e-3, "eval_every": 2} | train,
        "run": {"folder": str(folder), "sample_tokens": 4, "report": False},
    }


@pytest.fixture(scope="module")
def plain(workshop, tmp_path_factory):
    """A run of the settings above with a report, which tests read only."""
    sections = settings(workshop, tmp_path_factory.mktemp("plain") / "run")
    sections["run"]["report"] = True
    return isotype.train(**sections)


def test_train_returns_a_run_with_metrics_adapter_report_and_chat(plain):
    run = plain
    assert run.status == "done"
    assert list(run.metrics.dropna(subset=["loss"])["step"]) == [1, 2, 3, 4]
    assert (run.adapter / "adapter_model.safetensors").is_file()
    assert isinstance(run.chat("How much is 1 plus 2?", max_new_tokens=4), str)
    assert run.report.is_file()
    assert "best evaluation loss" in repr(run)
    with pytest.raises(UsageError, match=r"run\.adapter is what it saved"):
        _ = run.model


def test_a_run_configuration_and_a_resume(default_run, configured):
    loaded = configured("part", train={"steps": 6})

    class StopsAt3(isotype.Callback):
        def on_step(self, moment):
            if moment.step == 3:
                moment.stop()

    first = isotype.train(loaded.config, callbacks=[StopsAt3()])
    assert first.result["steps"] == 3
    # the last step is sampled, as that of a run that comes to its end; the plan has 2, 4 and 6
    assert [row["step"] for row in metrics(first.folder) if row.get("event") == "evaluation"] == [
        0,
        2,
    ]
    assert (first.folder / "samples/step_3.json").is_file()
    resumed = isotype.train(resume=first.folder)
    assert resumed.result["steps"] == 6
    same_result(default_run, resumed.folder)


def test_a_mistyped_key_names_the_call_and_the_key(workshop, tmp_path):
    with pytest.raises(
        UsageError,
        match=r"isotype.train\(\) train.lerning_rate: unknown key, did you mean train.learning_rate",
    ):
        isotype.train(**settings(workshop, tmp_path / "run", lerning_rate=1e-4))
    assert not (tmp_path / "run").exists()


def test_callbacks_that_draw_and_generate_leave_the_run_bit_identical(plain, workshop, tmp_path):
    told = []

    class Watches(isotype.Callback):
        def on_step(self, moment):
            torch.rand(7)
            ids = torch.arange(8)[None]
            moment.model.eval()(input_ids=ids, labels=ids).loss.backward()
            torch.set_grad_enabled(False)
            torch.set_default_dtype(torch.float64)
            told.append(("step", moment.step, moment.row["loss"]))

        def on_evaluation(self, moment):
            moment.model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=True)
            told.append(("evaluation", moment.step, moment.row["eval_loss"]))

        def on_save(self, moment):
            told.append(("save", moment.step, moment.row["folder"]))

        def on_samples(self, moment):
            told.append(("samples", moment.step, moment.row["samples"]))

    sections = settings(workshop, tmp_path / "watched")
    # a section may be a mapping or its class
    sections["train"] = TrainSection(**sections["train"])
    watched = isotype.train(**sections, callbacks=[Watches()])
    same_result(plain.folder, watched.folder)
    assert {name for name, *_ in told} == {"step", "evaluation", "save", "samples"}


def test_a_callback_that_changes_a_weight_stops_the_run(workshop, tmp_path):
    class Changes(isotype.Callback):
        def on_step(self, moment):
            with torch.no_grad():
                next(p for p in moment.model.parameters() if p.requires_grad).add_(1.0)

    with pytest.raises(RunError, match=r"Changes.on_step changed .*lora_"):
        isotype.train(**settings(workshop, tmp_path / "run"), callbacks=[Changes()])


def test_an_objective_replaces_the_cross_entropy(plain, workshop, tmp_path):
    def smoothed(model, batch):
        logits = model(**batch.inputs).logits[:, :-1].float()
        return F.cross_entropy(
            logits.flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            label_smoothing=0.2,
            reduction="sum",
        )

    run = isotype.train(
        **settings(workshop, tmp_path / "run", steps=1, eval_every=1), objective=smoothed
    )
    first, other = (r.metrics.dropna(subset=["loss"])["loss"].iloc[0] for r in (plain, run))
    assert first != pytest.approx(other)
    assert plain.record.curve("eval_loss")[0] == run.record.curve("eval_loss")[0]


def test_a_callback_that_cannot_be_called_is_refused_before_anything_is_loaded():
    class Mine(isotype.Callback):
        def on_save(self):
            pass

    with pytest.raises(
        UsageError,
        match=r"Mine\.on_save cannot be called with a Moment alone: too many positional arguments",
    ):
        isotype.train(model="nowhere", data="nothing.jsonl", callbacks=[Mine()])
    with pytest.raises(UsageError, match=r"function is no isotype\.Callback"):
        isotype.train(model="nowhere", data="nothing.jsonl", callbacks=[lambda moment: None])


def summed_loss(model, batch):
    logits = model(**batch.inputs).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")


class StopsAt2(isotype.Callback):
    def on_step(self, moment):
        if moment.step == 2:
            moment.stop()


@pytest.mark.full
@pytest.mark.parametrize("with_objective", [True, False])
def test_a_run_does_not_go_on_with_another_objective(workshop, tmp_path, with_objective):
    first, second = (summed_loss, None) if with_objective else (None, summed_loss)
    run = isotype.train(
        **settings(workshop, tmp_path / "run"), callbacks=[StopsAt2()], objective=first
    )
    with pytest.raises(UsageError, match=r"it was trained with .*, and would continue with"):
        isotype.train(resume=run.folder, objective=second)
    assert isotype.train(resume=run.folder, objective=first).result["steps"] == 4


def process_state():
    return {
        "dtype": torch.get_default_dtype(),
        "strict": torch.are_deterministic_algorithms_enabled(),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "verbosity": transformers.utils.logging.get_verbosity(),
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "peft": logging.getLogger("peft").level,
        "warnings": list(warnings.filters),
    }


def test_a_run_leaves_the_process_as_it_was(workshop, tmp_path):
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_progress_bar()
    before = process_state()
    isotype.train(**settings(workshop, tmp_path / "run", deterministic=True, steps=1, eval_every=1))
    assert process_state() == before


def test_the_command_line_and_python_give_bit_identical_runs(plain, workshop, tmp_path):
    given = settings(workshop, tmp_path / "python")
    asked = [
        f"{name}.{key}={value}" for name in ("data", "train") for key, value in given[name].items()
    ]
    asked += ["precision.preset=fp32", "adapter.r=4", "run.sample_tokens=4"]
    ended = CliRunner().invoke(
        build_app(),
        ["train", "--model", str(workshop.base), "--out", str(tmp_path / "command"), *asked],
    )
    assert ended.exit_code == 0, ended.output
    same_result(plain.folder, tmp_path / "command")


def test_changes_that_make_another_run_need_accept_changes(workshop, tmp_path):
    run = isotype.train(**settings(workshop, tmp_path / "run"), callbacks=[StopsAt2()])
    with pytest.raises(UsageError, match="accept_changes=True"):
        isotype.train(resume=run.folder, train={"learning_rate": 2e-3, "beta2": 0.9})
    changed = isotype.train(resume=run.folder, train={"beta2": 0.9}, accept_changes=True)
    assert changed.result["steps"] == 4
    with pytest.raises(UsageError, match="no effect without resume"):
        isotype.train(**settings(workshop, tmp_path / "other"), accept_changes=True)


def test_an_interrupt_before_step_1_raises_keyboard_interrupt_and_leaves_no_run(
    workshop, tmp_path, monkeypatch
):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("isotype.training.run.preflight", interrupted)
    with pytest.raises(KeyboardInterrupt, match="before step 1"):
        isotype.train(**settings(workshop, tmp_path / "run"))
    assert not (tmp_path / "run/resolved.yaml").exists()
