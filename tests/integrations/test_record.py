"""What an attached run leaves in output_dir/isotype/, the preflight that is part of it, and what a resumed run is told."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from isotype.errors import PreflightError, RunError, UsageError
from isotype.integrations import attach
from isotype.observe import is_observed
from isotype.precision.precision import ROLES
from tests.integrations.trainers import TRAINERS, Encoded, Setting, curve, plain

pytest.importorskip("trl")


def run(name, models, tmp_path, *, precision="bf16-lora", **more):
    trainer = TRAINERS[name](Setting(models, bf16=precision != "fp32", more={"output_dir": str(tmp_path), **more}))
    attach(trainer, precision, quiet=True)
    trainer.train()
    return trainer, lambda file: json.loads((tmp_path / "isotype" / f"{file}.json").read_text())


@pytest.mark.parametrize(
    ("name", "head", "times"), [("SFT", "linear_log_probs", 1), ("Trainer", "linear_cross_entropy", 1), ("DPO", "linear_log_probs", 2)]
)
def test_the_folder_records_declared_replaced_and_observed(name, head, times, models, tmp_path):
    trainer, read = run(name, models, tmp_path)
    manifest, precision = read("manifest"), read("precision")
    calls = {(c["part"], c["op"]): c["calls"] for c in manifest["first_step"]}
    assert calls["head", head] == times
    # each of the two layers has four projections of its attention; the three of its MLP run inside `lora_mlp`
    assert calls["lora", "lora_linear"] == 8
    assert calls["gated mlp", "lora_mlp"] == 2 * times
    assert calls["norm", "rms_norm"] == 5 * times
    assert {c["owner"] for c in manifest["claims"]} >= {"training arguments", "accelerate", "PEFT, adapters"}
    assert precision["violations"] == []
    assert precision["observed"]["grads"] == {"fp32": 28}
    assert set(precision["observed"]["optimizer"]) == set(precision["observed"]["trainable"]) == {"fp32"}
    assert set(precision["observed"]["compute"]) == {"bf16"}
    rows = [json.loads(line) for line in (tmp_path / "isotype" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all("share_changed" in row for row in rows if "loss" in row)
    assert rows[-2]["promotions"] == rows[1]["promotions"] >= 0
    assert read("result")["status"] == "done"
    assert "bf16-lora" in (tmp_path / "isotype" / "report.html").read_text()
    assert read("env")["packages"]["trl"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "precision", "more"),
    [("DPO", "bf16-mixed", {}), ("DPO", "fp32", {"precompute_ref_log_probs": True}), ("GKD", "fp32", {})],
)
def test_a_reference_a_teacher_and_the_batch_are_known(name, precision, more, models, tmp_path):
    more = {"output_dir": str(tmp_path), "max_steps": 2, **more}
    trainer = TRAINERS[name](Setting(models, form="full", bf16=precision != "fp32", more=more))
    attach(trainer, precision, quiet=True, preflight=False)
    trainer.train()
    seen = json.loads((tmp_path / "isotype" / "precision.json").read_text())
    assert seen["violations"] == []
    assert [what for what in seen["unobserved"] if "outside" in what] == []


@pytest.mark.parametrize(("form", "precision"), [("lora", "bf16-lora"), pytest.param("full", "bf16-mixed", marks=pytest.mark.full)])
def test_every_declared_role_is_observed_or_has_the_reason(form, precision, models, tmp_path):
    trainer = TRAINERS["DPO"](Setting(models, form=form, more={"output_dir": str(tmp_path), "max_steps": 2}))
    attach(trainer, precision, quiet=True, preflight=False)
    trainer.train()
    seen = json.loads((tmp_path / "isotype" / "precision.json").read_text())
    declared = {role for role in ROLES if seen["declared"].get(role)}
    assert {"loss", "save", "base"} <= declared
    assert declared - set(seen["observed"]) - set(seen["unobserved"]) == set()
    assert ("the weights of ref_model" in seen["unobserved"]) == (form == "full")


def test_a_cast_behind_the_precisions_back_is_a_warning_and_a_violation(models, tmp_path):
    trainer = TRAINERS["SFT"](Setting(models, bf16=True, more={"output_dir": str(tmp_path)}))
    attach(trainer, "bf16-lora", quiet=True, preflight=False)
    norm = trainer.model.base_model.model.model.layers[1].input_layernorm
    norm.weight.data = norm.weight.data.float()
    with pytest.warns(UserWarning, match="declared bf16"):
        trainer.train()
    assert json.loads((tmp_path / "isotype" / "precision.json").read_text())["violations"]


class Afterwards(TrainerCallback):
    """Calls `act(model)` after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.act(model)


def test_the_schedule_of_a_run_is_observed_and_the_step_after_a_change(models, tmp_path):
    def multiply_in_fp32(model):
        projection = model.model.layers[1].self_attn.o_proj

        def forward(x):
            with torch.autocast("cpu", enabled=False):
                return torch.nn.functional.linear(x.float(), projection.weight.float()).to(x.dtype)

        projection.forward = forward

    total = 12
    drawn = [step for step in range(1, total + 1) if is_observed(step, every=100, seed=42, total=total)]
    change = next(step for step in range(3, total) if step + 1 not in drawn)
    more = {"output_dir": str(tmp_path), "max_steps": total, "seed": 42}
    trainer = plain(Setting(models, form="full", bf16=True, more=more))
    trainer.add_callback(Afterwards(change, multiply_in_fp32))
    attach(trainer, "bf16-mixed", quiet=True, preflight=False)
    with pytest.warns(UserWarning, match="o_proj multiplies in fp32, declared bf16"):
        trainer.train()
    seen = json.loads((tmp_path / "isotype" / "precision.json").read_text())
    assert seen["observed_at"] == sorted([*drawn, change + 1])
    # a later look that finds the same does not repeat it
    assert [finding["place"]["symbol"] for finding in seen["violations"]] == ["mm in model.layers.1.self_attn.o_proj"]


@pytest.mark.parametrize("step", [2])
def test_nothing_is_watched_after_a_step_that_raised(step, models):
    trainer = plain(Setting(models))
    attach(trainer, "fp32", quiet=True, preflight=False)

    def nan(module, args):
        if trainer.state.global_step == step - 1:
            return (args[0] * float("nan"), *args[1:])

    trainer.model.base_model.model.model.layers[1].mlp.register_forward_pre_hook(nan)
    with pytest.raises(RunError, match=f"step {step}: the loss is not finite"):
        trainer.train()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_another_process_than_the_first_writes_nothing(models, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "process_index", 1)
    run("Trainer", models, tmp_path, precision="fp32")
    assert not (tmp_path / "isotype").exists()


@pytest.mark.parametrize("name", ["SFT", *(pytest.param(name, marks=pytest.mark.full) for name in ("Trainer", "DPO", "Reward"))])
def test_a_run_with_preflight_is_bit_for_bit_the_run_without(name, models):
    curves = []
    for preflight in (True, False):
        trainer = TRAINERS[name](Setting(models))
        attach(trainer, "fp32", quiet=True, preflight=preflight)
        curves.append(curve(trainer))
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        curves.append(weights.tolist())
    assert curves[:2] == curves[2:]


def test_every_check_ran_or_has_its_reason(models, tmp_path):
    _, read = run("SFT", models, tmp_path, eval_strategy="steps", eval_steps=2)
    assert {"PF003", "PF005", "PF007", "PF008", "PF009", "PF012", "PF016", "PF017", "PF020"} <= set(read("preflight")["checks"])
    _, read = run("GRPO", models, tmp_path)
    skipped = {s["code"]: s["reason"] for s in read("preflight")["skipped"]}
    assert "generation" in skipped["PF012"]
    assert "no plain tokens" in skipped["PF005"]
    assert "is the check, which does not run" in skipped["PF011"]


def test_rows_without_labels_are_refused_before_step_1(models):
    rows = Encoded()
    for row in rows.rows:
        row["labels"] = torch.full_like(row["labels"], -100)
    trainer = plain(Setting(models))
    trainer.train_dataset = rows
    attach(trainer, "fp32", quiet=True)
    with pytest.raises(PreflightError, match=r"PF005(.|\n)*16 of 16 training rows have no token to learn"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_token_beyond_the_embeddings_and_a_row_beyond_the_positions_are_found(models, tmp_path):
    trainer = TRAINERS["SFT"](Setting(models, more={"output_dir": str(tmp_path)}))
    rows = trainer.train_dataset.to_list()
    rows[3]["input_ids"][0] = 4000
    trainer.train_dataset = type(trainer.train_dataset).from_list(rows)
    attach(trainer, "fp32", quiet=True)
    with pytest.raises(PreflightError, match="PF008"):
        trainer.train()


def test_a_learning_rate_of_zero_is_refused_unless_skipped(models, tmp_path):
    trainer = plain(Setting(models, rate=0.0))
    attach(trainer, "fp32", quiet=True)
    with pytest.raises(PreflightError, match=r"PF003 the learning rate is 0(.|\n)*where     learning_rate(.|\n)*attach\(..., skip=\{"):
        trainer.train()
    trainer = plain(Setting(models, rate=0.0, more={"output_dir": str(tmp_path)}))
    attach(trainer, "fp32", quiet=True, skip={"PF003": "a dry run"})
    trainer.train()
    skipped = json.loads((tmp_path / "isotype" / "preflight.json").read_text())["skipped"]
    assert {"code": "PF003", "check": "updates survive rounding into the trained dtype", "reason": "a dry run"} in skipped


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"skip": {"PF999": "x"}}, "no such check"),
        ({"skip": {"PF003": ""}}, "reason is needed"),
        ({"skip": {"PF003": "x"}, "preflight": False}, "no effect with preflight=False"),
        ({"record": False}, "no effect with record=False"),
    ],
)
def test_settings_without_effect_are_refused(given, words, models):
    with pytest.raises(UsageError, match=words):
        attach(plain(Setting(models)), "fp32", **given)


def test_a_resumed_run_goes_on_in_its_record(models, tmp_path):
    more = {"output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run("Trainer", models, tmp_path, precision="fp32", **{k: v for k, v in more.items() if k != "output_dir"})
    trainer = plain(Setting(models, rate=5e-4, more={**more, "lr_scheduler_type": "constant"}))
    attach(trainer, "fp32", quiet=True)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [json.loads(line) for line in (tmp_path / "isotype" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]


def test_a_stream_is_not_read(models):
    trainer = TRAINERS["SFT"](Setting(models))
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    attach(trainer, "fp32", quiet=True)
    trainer.train()
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 3
