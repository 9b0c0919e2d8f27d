"""What an attached run leaves in output_dir/isotype/, the preflight that is part of it, and what a
resumed run is told.
"""

import json

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from transformers import Trainer, TrainerCallback

from isotype.errors import PreflightError, RunError, UsageError
from isotype.integrations import attach
from isotype.observe import is_observed
from tests.integrations.trainers import TRAINERS, Encoded, Setting, attached, curve, plain

pytest.importorskip("trl")


def run(name, models, tmp_path, *, precision="bf16-lora", **more):
    trainer = attached(
        TRAINERS[name](
            Setting(models, bf16=precision != "fp32", more={"output_dir": str(tmp_path), **more})
        ),
        precision,
    )
    trainer.train()
    return trainer, lambda file: json.loads((tmp_path / "isotype" / f"{file}.json").read_text())


@pytest.mark.parametrize(
    ("name", "head", "times"),
    [
        ("Trainer", "linear_cross_entropy", 1),
        pytest.param("DPO", "linear_log_probs", 2, marks=pytest.mark.full),
    ],
)
def test_the_folder_records_declared_replaced_and_observed(name, head, times, models, tmp_path):
    trainer, read = run(name, models, tmp_path)
    manifest, precision = read("manifest"), read("precision")
    calls = {(c["part"], c["op"]): c["calls"] for c in manifest["first_step"]}
    assert calls["head", head] == times
    # each of the two layers has four projections of its attention; the three of its MLP run inside
    # `lora_mlp`
    assert calls["lora", "lora_linear"] == 8
    assert calls["gated mlp", "lora_mlp"] == 2 * times
    assert calls["norm", "rms_norm"] == 5 * times
    assert {c["owner"] for c in manifest["claims"]} >= {
        "training arguments",
        "accelerate",
        "PEFT, adapters",
    }
    assert precision["violations"] == []
    assert precision["observed"]["grads"] == {"fp32": 28}
    assert (
        set(precision["observed"]["optimizer"])
        == set(precision["observed"]["trainable"])
        == {"fp32"}
    )
    assert set(precision["observed"]["compute"]) == {"bf16"}
    rows = [
        json.loads(line)
        for line in (tmp_path / "isotype" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all("share_changed" in row for row in rows if "loss" in row)
    assert rows[-2]["promotions"] == rows[1]["promotions"] >= 0
    assert read("result")["status"] == "done"
    assert "bf16-lora" in (tmp_path / "isotype" / "report.html").read_text()
    assert read("env")["packages"]["trl"]


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
    drawn = [
        step for step in range(1, total + 1) if is_observed(step, every=100, seed=42, total=total)
    ]
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
    assert [finding["place"]["symbol"] for finding in seen["violations"]] == [
        "mm in model.layers.1.self_attn.o_proj"
    ]


@pytest.mark.parametrize(
    "name",
    ["SFT", *(pytest.param(name, marks=pytest.mark.full) for name in ("Trainer", "DPO", "Reward"))],
)
def test_a_run_with_preflight_is_bit_for_bit_the_run_without(name, models):
    curves = []
    for preflight in (True, False):
        trainer = attached(TRAINERS[name](Setting(models)), "fp32", preflight=preflight)
        curves.append(curve(trainer))
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        curves.append(weights.tolist())
    assert curves[:2] == curves[2:]


def test_every_check_ran_or_has_its_reason(models, tmp_path):
    _, read = run("SFT", models, tmp_path, eval_strategy="steps", eval_steps=2)
    assert {"PF003", "PF005", "PF007", "PF008", "PF009", "PF012", "PF016", "PF017", "PF020"} <= set(
        read("preflight")["checks"]
    )
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
    with pytest.raises(
        PreflightError, match=r"PF005(.|\n)*16 of 16 training rows have no token to learn"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_learning_rate_of_zero_is_refused_unless_skipped(models, tmp_path):
    trainer = attached(plain(Setting(models, rate=0.0)), "fp32")
    with pytest.raises(
        PreflightError,
        match=r"PF003 the learning rate is 0(.|\n)*where     learning_rate(.|\n)*attach\(..., skip=\{",
    ):
        trainer.train()
    trainer = attached(
        plain(Setting(models, rate=0.0, more={"output_dir": str(tmp_path)})),
        "fp32",
        skip={"PF003": "a dry run"},
    )
    trainer.train()
    skipped = json.loads((tmp_path / "isotype" / "preflight.json").read_text())["skipped"]
    assert {
        "code": "PF003",
        "check": "updates survive rounding into the trained dtype",
        "reason": "a dry run",
    } in skipped


def test_the_record_of_a_refusal_names_the_trainers_arguments(models, tmp_path):
    trainer = attached(plain(Setting(models, rate=0.0, more={"output_dir": str(tmp_path)})), "fp32")
    with pytest.raises(PreflightError):
        trainer.train()
    record = json.loads((tmp_path / "isotype" / "preflight.json").read_text())
    finding = next(f for f in record["findings"] if f["code"] == "PF003")
    assert finding["place"]["symbol"] == "learning_rate"
    assert finding["fix"] == "learning_rate above 0"


def test_settings_without_effect_are_refused(models, subtests):
    for given, words in (
        ({"skip": {"PF999": "x"}}, "no such check"),
        ({"skip": {"PF003": ""}}, "reason is needed"),
        ({"skip": {"PF003": "x"}, "preflight": False}, "no effect with preflight=False"),
        ({"record": False}, "no effect with record=False"),
    ):
        with subtests.test(words), pytest.raises(UsageError, match=words):
            attach(plain(Setting(models)), "fp32", **given)


def test_a_resumed_run_goes_on_in_its_record(models, tmp_path):
    more = {"output_dir": str(tmp_path), "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(
        "Trainer",
        models,
        tmp_path,
        precision="fp32",
        **{k: v for k, v in more.items() if k != "output_dir"},
    )
    trainer = attached(
        plain(Setting(models, rate=5e-4, more={**more, "lr_scheduler_type": "constant"})), "fp32"
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [
        json.loads(line)
        for line in (tmp_path / "isotype" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]


# --- An optimizer with a hook of a program's own: the preflight does not rehearse it, and the run
# is the plain one.


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_an_update_that_moves_no_weight_is_refused_where_gradients_ask_for_one(
    share, models, tmp_path
):
    class Copies(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = AdamW(
                [nn.Parameter(p.detach().clone()) for p in self.model.parameters()], lr=1e-2
            )
            return self.optimizer

        def compute_loss(self, *args, **kwargs):
            return share * super().compute_loss(*args, **kwargs)

    trainer = attached(
        plain(
            Setting(models, form="full", more={"output_dir": str(tmp_path), "max_steps": 2}), Copies
        ),
        "fp32",
        preflight=False,
    )
    if share:
        with pytest.raises(
            RunError,
            match="step 1 changed no weight, and its gradients and learning rate are not zero: AdamW",
        ):
            trainer.train()
    else:  # as in a policy's step whose rewards are equal
        trainer.train()
