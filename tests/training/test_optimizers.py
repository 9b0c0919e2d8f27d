"""`train.optimizer`: each optimizer's run is observed, planned and resumed bit for bit; what would
do nothing is refused.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from tests.models import lora, tiny
from tests.results import losses, same_tensors
from tests.training.interrupted import cut_back
from torch import nn

from isotype.config.schema import AdapterSection, TrainSection
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from isotype.training import optimizer as optimizer_module
from isotype.training.optimizer import build_optimizer, state_bytes, use_averages

PACKAGES = {
    "schedule-free": "schedulefree",
    "prodigy": "prodigyopt",
    "muon": "torch",
    "adafactor": "torch",
}
OPTIMIZERS = ("adamw8bit", "lion", "lion8bit", "muon", "adafactor", "schedule-free", "prodigy")
RESUMED = [
    pytest.param(name, marks=[] if name == "schedule-free" else pytest.mark.full)
    for name in OPTIMIZERS
]


def needs(name: str) -> None:
    pytest.importorskip(PACKAGES.get(name, "bitsandbytes"))


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_is_observed_and_resumes_bit_identically(configured, tmp_path, name):
    needs(name)
    rate = {"prodigy": 1.0, "adafactor": 0.5, "schedule-free": 0.01}.get(name, 1e-3)
    settings = {
        "precision": {"preset": "bf16-lora"},
        "train": {"optimizer": name, "learning_rate": rate},
        "adapter": {"r": 128},
    }
    assert train(configured("whole", **settings)) == 0
    whole, again = tmp_path / "whole", tmp_path / "again"
    record = json.loads((whole / "precision.json").read_text())
    assert record["violations"] == []
    assert set(record["observed"]["optimizer"]) == (
        {"int8", "fp32"} if "8bit" in name else {"fp32"}
    )
    steps = [row for row in losses(whole) if row[1] is not None]
    assert steps[-1][1] < steps[0][1], "it learns"
    shutil.copytree(whole, again)
    cut_back(again, 6)
    assert train(configured("again", **settings), resume=again) == 0
    assert json.loads((again / "resumes.json").read_text())["steps"] == [4]
    same_tensors(whole, again)
    assert losses(whole) == losses(again)


def test_planned_states_are_those_that_it_keeps(subtests):
    for name in OPTIMIZERS:
        with subtests.test(name):
            needs(name)
            model = lora(tiny(hidden_size=64, intermediate_size=96), r=64)
            settings = TrainSection(optimizer=name)
            precision = PRESETS["bf16-lora"].but(
                **({"optimizer": "int8"} if "8bit" in name else {})
            )
            optimizer = build_optimizer(model, settings, precision, lambda p: p.grad)
            trained = [p for p in model.parameters() if p.requires_grad]
            for p in trained:
                p.data.normal_()  # Prodigy keeps no start of a tensor of zeros
                p.grad = torch.randn_like(p)
            optimizer.step()
            states = [item for p in trained for item in optimizer.state[p].items()]
            # step counts, and the tables of 8-bit states that all tensors share
            kept = [
                t
                for key, t in states
                if isinstance(t, torch.Tensor) and key not in ("step", "qmap1", "qmap2")
            ]
            assert sum(t.nbytes for t in kept) == state_bytes(model, settings, precision)


def test_muon_takes_matrices_and_each_expert_alone():
    model = attach_adapter(
        tiny("qwen3_moe"), AdapterSection(r=4, modules_to_save=["lm_head", "embed_tokens"]), seed=0
    )
    optimizer = build_optimizer(
        model,
        TrainSection(optimizer="muon", learning_rate=0.01),
        PRESETS["bf16-lora"],
        lambda p: p.grad,
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {}
    for name, p in trained.items():
        p.data.normal_()
        p.grad = torch.randn_like(p)
        before[name] = p.detach().clone()
    optimizer.step()
    assert {name for name, p in trained.items() if "momentum_buffer" in optimizer.state[p]} == {
        n for n in trained if ".lora_" in n
    }
    name = next(name for name in trained if ".experts.lora_A" in name)
    a, b = trained[name], trained[name.replace("lora_A", "lora_B")]
    experts = model.config.num_experts
    for p, of in ((a, lambda t, e: t[4 * e : 4 * e + 4]), (b, lambda t, e: t[:, e::experts])):
        full = next(n for n, q in trained.items() if q is p)
        for e in range(experts):
            alone = nn.Parameter(of(before[full], e).clone())
            alone.grad = of(p.grad, e).clone()
            torch.optim.Muon(
                [alone], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ).step()
            # its products are bf16
            torch.testing.assert_close(of(p.detach(), e), alone.detach(), rtol=1e-2, atol=1e-4)


def test_schedule_free_shows_its_averages_and_restores_every_bit():
    pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(
        model,
        TrainSection(optimizer="schedule-free", learning_rate=0.1),
        PRESETS["fp32"],
        lambda p: p.grad,
    )
    start, visited = model.weight.detach().clone(), []
    for _ in range(4):
        model.weight.grad, model.bias.grad = torch.randn(8, 8), torch.randn(8)
        optimizer.step()
        visited.append(optimizer.state[model.weight]["z"].clone())
    trained = model.weight.detach().clone()
    with use_averages(optimizer):
        # at a constant rate x is the mean of what z was: Defazio et al. 2024
        torch.testing.assert_close(model.weight.detach(), torch.stack(visited).mean(0))
    assert torch.equal(model.weight, trained)
    assert not torch.equal(trained, start)
    optimizer.step()


def test_settings_without_effect_are_refused(configured, subtests):
    lora, pure = (
        {"precision": {"preset": "bf16-lora"}},
        {"precision": {"preset": "bf16-pure"}, "adapter": {"kind": "none"}},
    )
    for sections, settings, says in (
        (lora, {"optimizer": "adamw8bit-paged"}, "on a CPU, where nothing is paged"),
        (lora, {"optimizer": "schedule-free", "schedule": "cosine"}, "with train.schedule: cosine"),
        (
            lora,
            {"optimizer": "prodigy"},
            "with train.learning_rate: 0.001: it finds the rate itself",
        ),
        (
            lora,
            {"optimizer": "adafactor", "beta1": 0.8},
            "train.beta1 has no effect with train.optimizer: adafactor",
        ),
        (pure, {"optimizer": "muon"}, "muon needs fp32 weights and gradients"),
        (pure, {"optimizer": "lion8bit"}, "lion8bit on bf16 weights ignores"),
    ):
        with subtests.test(says):
            needs(settings["optimizer"])
            with pytest.raises(UsageError, match=re.escape(says)):
                train(configured(**sections, train=settings))


def test_a_missing_package_and_a_model_without_matrices_are_said_in_one_line(
    configured, monkeypatch
):
    monkeypatch.setattr(optimizer_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"train.optimizer: prodigy needs prodigyopt"):
        train(configured(train={"optimizer": "prodigy", "learning_rate": 1}))
    with pytest.raises(UsageError, match="muon: no matrix is trained"):
        build_optimizer(
            nn.LayerNorm(4), TrainSection(optimizer="muon"), PRESETS["fp32"], lambda p: p.grad
        )
