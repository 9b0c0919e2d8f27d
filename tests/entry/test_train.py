"""`isotype.train(...)` and the Run it returns, as a notebook would use them."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import isotype
from isotype.config.schema import TrainSection
from isotype.errors import RunError, UsageError
from isotype.tasks.choose import train as train_loaded
from tests.training.test_run import same_result


def settings(workshop, folder, **train):
    return {
        "model": workshop.base,
        "data": {"train": str(workshop.chats), "eval_split": 0.1, "max_length": 64},
        "adapter": {"r": 4},
        "precision": "fp32",
        "train": {"steps": 4, "batch_size": 4, "learning_rate": 1e-3, "eval_every": 2} | train,
        "run": {"folder": str(folder), "sample_tokens": 4},
    }


def test_train_returns_a_run_with_metrics_adapter_report_and_chat(workshop, tmp_path):
    run = isotype.train(**settings(workshop, tmp_path / "run"))
    assert run.status == "done"
    assert list(run.metrics.dropna(subset=["loss"])["step"]) == [1, 2, 3, 4]
    assert (run.adapter / "adapter_model.safetensors").is_file()
    assert isinstance(run.chat("How much is 1 plus 2?", max_new_tokens=4), str)
    assert run.report.is_file()
    assert run._repr_png_().startswith(b"\x89PNG")
    assert "best evaluation loss" in repr(run)
    with pytest.raises(UsageError, match=r"run\.adapter is what it saved"):
        _ = run.model


def test_a_section_is_a_name_a_mapping_or_its_class(workshop, tmp_path):
    given = settings(workshop, tmp_path / "run")
    one = isotype.train(**given)
    other = isotype.train(**given | {"train": TrainSection(**given["train"]), "run": {**given["run"], "folder": str(tmp_path / "other")}})
    same_result(one.folder, other.folder)


def test_a_run_configuration_and_a_resume(workshop, tmp_path, configured):
    assert train_loaded(configured("whole", train={"steps": 6})) == 0
    loaded = configured("part", train={"steps": 6})

    class StopsAt3(isotype.Callback):
        def on_step(self, moment):
            if moment.step == 3:
                moment.stop()

    first = isotype.train(loaded.config, callbacks=[StopsAt3()])
    assert first.result["steps"] == 3
    resumed = isotype.train(resume=first.folder)
    assert resumed.result["steps"] == 6
    same_result(tmp_path / "whole", resumed.folder)


def test_a_mistyped_key_names_the_call_and_the_key(workshop, tmp_path):
    with pytest.raises(UsageError, match=r"isotype.train\(\) train.lerning_rate: unknown key, did you mean train.learning_rate"):
        isotype.train(**settings(workshop, tmp_path / "run", lerning_rate=1e-4))
    assert not (tmp_path / "run").exists()


def test_callbacks_that_draw_and_generate_leave_the_run_bit_identical(workshop, tmp_path):
    plain = isotype.train(**settings(workshop, tmp_path / "plain"))
    told = []

    class Watches(isotype.Callback):
        def on_step(self, moment):
            torch.rand(7)
            moment.model.eval()
            told.append(("step", moment.step, moment.row["loss"]))

        def on_evaluation(self, moment):
            moment.model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=True)
            told.append(("evaluation", moment.step, moment.row["eval_loss"]))

        def on_save(self, moment):
            told.append(("save", moment.step, moment.row["folder"]))

        def on_samples(self, moment):
            told.append(("samples", moment.step, moment.row["samples"]))

    watched = isotype.train(**settings(workshop, tmp_path / "watched"), callbacks=[Watches()])
    same_result(plain.folder, watched.folder)
    assert {name for name, *_ in told} == {"step", "evaluation", "save", "samples"}


def test_a_callback_that_changes_a_weight_stops_the_run(workshop, tmp_path):
    class Changes(isotype.Callback):
        def on_step(self, moment):
            with torch.no_grad():
                next(p for p in moment.model.parameters() if p.requires_grad).add_(1.0)

    with pytest.raises(RunError, match=r"Changes.on_step changed .*lora_"):
        isotype.train(**settings(workshop, tmp_path / "run"), callbacks=[Changes()])


def test_an_objective_replaces_the_cross_entropy(workshop, tmp_path):
    def smoothed(model, batch):
        logits = model(**batch.inputs).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), label_smoothing=0.2, reduction="sum")

    plain = isotype.train(**settings(workshop, tmp_path / "plain"))
    run = isotype.train(**settings(workshop, tmp_path / "run"), objective=smoothed)
    first, other = (r.metrics.dropna(subset=["loss"])["loss"].iloc[0] for r in (plain, run))
    assert first != pytest.approx(other)
    assert plain.record.curve("eval_loss")[0] == run.record.curve("eval_loss")[0]


def test_a_callback_class_in_place_of_an_object_is_refused_before_anything_is_loaded():
    class Mine(isotype.Callback):
        pass

    with pytest.raises(UsageError, match="Mine is a class") as refused:
        isotype.train(model="nowhere", data="nothing.jsonl", callbacks=[Mine])
    assert "Mine()" in str(refused.value)


def test_a_callback_that_cannot_be_called_is_refused_before_anything_is_loaded():
    class Mine(isotype.Callback):
        def on_save(self):
            pass

    with pytest.raises(UsageError, match=r"Mine\.on_save cannot be called with a Moment alone: too many positional arguments"):
        isotype.train(model="nowhere", data="nothing.jsonl", callbacks=[Mine()])
    with pytest.raises(UsageError, match=r"function is no isotype\.Callback"):
        isotype.train(model="nowhere", data="nothing.jsonl", callbacks=[lambda moment: None])


def test_a_callback_that_rounds_the_optimizers_states_stops_the_run(workshop, tmp_path):
    class Rounds(isotype.Callback):
        def on_step(self, moment):
            for optimizer in [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)]:
                for states in optimizer.state.values():
                    for state in states.values():
                        if isinstance(state, torch.Tensor) and state.ndim:
                            state.copy_(state.to(torch.bfloat16))

    with pytest.raises(RunError, match=r"Rounds.on_step changed the optimizer's exp_avg.* of .*lora_"):
        isotype.train(**settings(workshop, tmp_path / "run"), callbacks=[Rounds()])
