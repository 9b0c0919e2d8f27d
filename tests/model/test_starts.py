"""`adapter.start`, `dora`, patterns and `plus`: what they begin with, what is saved, what is
refused.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.config.schema import AdapterSection, TrainSection
from isotype.errors import UsageError
from isotype.model.adapter import attach_adapter, save_adapter
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from isotype.training.optimizer import build_optimizer
from tests.commands import ask
from tests.models import quantised, tiny
from tests.results import same_tensors
from tests.training.interrupted import cut_back

IDS = torch.arange(40).view(2, 20) * 7 % 90 + 3


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("start", "rslora"), [("orthogonal", False), ("pissa", True), ("olora", False)]
)
def test_a_saved_start_is_the_trained_model_on_the_untouched_base(start, rslora, tmp_path):
    untouched = logits(tiny())
    section = AdapterSection(
        r=4,
        start=start,
        rslora=rslora,
        rank_pattern={"down_proj": 2},
        alpha_pattern={"up_proj": 8.0},
    )
    model = attach_adapter(tiny(), section, seed=0)
    assert all(p.any() for name, p in model.named_parameters() if ".lora_" in name), (
        "A and B begin with values"
    )
    assert far(logits(model), untouched) < 1e-5
    for p in model.parameters():
        if p.requires_grad:
            p.data += torch.randn_like(p) * 0.02
    trained = logits(model)
    save_adapter(model, tmp_path, PRESETS["fp32"])
    loaded = PeftModel.from_pretrained(tiny(), str(tmp_path))
    assert loaded.peft_config["default"].r == (4 if start == "orthogonal" else 8)
    assert far(logits(loaded), trained) < 1e-5 < far(trained, untouched)


def test_pissa_begins_at_the_largest_singular_values_and_olora_at_the_qr():
    weight = tiny().model.layers[0].self_attn.q_proj.weight.detach()
    for start in ("pissa", "olora"):
        model = attach_adapter(tiny(), AdapterSection(r=4, alpha=8.0, start=start), seed=0)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        share = 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        if start == "pissa":
            u, s, v = torch.linalg.svd(weight.double())
            torch.testing.assert_close(
                share.double(), u[:, :4] * s[:4] @ v[:4], rtol=1e-4, atol=1e-6
            )
        else:
            q, r = torch.linalg.qr(weight.double())
            torch.testing.assert_close(share.double(), 2.0 * q[:, :4] @ r[:4], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.base_layer.weight + share, weight, rtol=1e-5, atol=1e-6)


def test_dora_begins_at_the_base_also_in_bf16():
    model = attach_adapter(tiny().bfloat16(), AdapterSection(r=4, dora=True), seed=0)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    torch.testing.assert_close(
        layer.lora_magnitude_vector["default"].weight.double(),
        layer.base_layer.weight.double().norm(dim=1),
    )


def test_patterns_give_ranks_and_scales_and_plus_gives_b_a_rate():
    section = AdapterSection(
        r=4, alpha=8.0, rank_pattern={"down_proj": 16}, alpha_pattern={r"layers\.0\..*q_proj": 2.0}
    )
    model = attach_adapter(tiny(), section, seed=0)
    layers = model.base_model.model.model.layers
    assert [layer.mlp.down_proj.lora_A["default"].out_features for layer in layers] == [16, 16]
    assert [layer.self_attn.q_proj.scaling["default"] for layer in layers] == [0.5, 2.0]
    optimizer = build_optimizer(model, TrainSection(), PRESETS["fp32"], lambda p: p.grad, plus=16.0)
    rates = {
        id(p): group.get("rate_factor", 1.0)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert all(
        rates[id(p)] == (16.0 if ".lora_B." in name else 1.0)
        for name, p in model.named_parameters()
        if p.requires_grad
    )


def test_settings_that_an_adapter_cannot_have_are_refused(configured, subtests):
    for family, section, says in (
        ("qwen3_moe", {"dora": True}, "adapter.dora: true: .*experts"),
        ("qwen3_moe", {"start": "pissa"}, "adapter.start: pissa: .*experts"),
        ("llama", {"start": "orthogonal", "r": 3}, "rank 3 .* is odd"),
        (
            "llama",
            {"rank_pattern": {"dwon_proj": 8}},
            "adapter.rank_pattern: dwon_proj: no adapted module has that name",
        ),
    ):
        with subtests.test(says), pytest.raises(UsageError, match=says):
            attach_adapter(tiny(family), AdapterSection(**section), seed=0)
    pytest.importorskip("bitsandbytes")
    with pytest.raises(UsageError, match=r"adapter.start: olora: the weight of .* is packed"):
        attach_adapter(quantised(tiny()), AdapterSection(r=4, start="olora"), seed=0)
    with pytest.raises(UsageError, match=r"adapter.plus: has no effect with adapter.kind: none"):
        train(configured(adapter={"kind": "none", "plus": 16}))


def test_a_run_with_all_of_them_resumes_checks_what_it_saved_and_merges(
    configured, workshop, tmp_path
):
    section = {"r": 4, "start": "pissa", "dora": True, "plus": 4, "rank_pattern": {"down_proj": 2}}
    settings = {"adapter": section, "precision": {"preset": "bf16-lora"}}
    assert train(configured("run", **settings)) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["check"]["reloaded_loss"] == pytest.approx(
        result["check"]["trained_loss"], rel=2**-8
    )
    assert json.loads((tmp_path / "run/precision.json").read_text())["violations"] == []
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workshop.base), str(tmp_path / "run/adapter")
    )
    assert loaded.peft_config["default"].r == 8
    # a resume decomposes the same base, and ends with the same bits
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "run", again)
    cut_back(again, 6)
    assert train(configured("again", **settings), resume=again) == 0
    same_tensors(tmp_path / "run", again)
    ask("merge", tmp_path / "run", "--out", tmp_path / "merged")


@pytest.mark.parametrize(
    "tied", [True, pytest.param(False, marks=pytest.mark.full)], ids=["tied", "untied"]
)
def test_trained_tokens_are_saved_and_merged_and_other_rows_stay(
    configured, workshop, tmp_path, tied
):
    base = AutoModelForCausalLM.from_pretrained(workshop.base)
    if tied:
        base.config.tie_word_embeddings = True
        base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    tokenizer.save_pretrained(tmp_path / "base")
    token = tokenizer.convert_ids_to_tokens(tokenizer("How", add_special_tokens=False).input_ids[0])
    settings = {
        "model": {"name": str(tmp_path / "base")},
        "adapter": {"r": 4, "train_tokens": [token]},
        "precision": {"preset": "bf16-lora"},
    }
    assert train(configured("run", **settings)) == 0
    ask("merge", tmp_path / "run", "--dtype", "fp32", "--out", tmp_path / "merged")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).float()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    changed = (
        (before.get_input_embeddings().weight != after.get_input_embeddings().weight)
        .any(1)
        .nonzero()
        .flatten()
        .tolist()
    )
    assert changed == [tokenizer.convert_tokens_to_ids(token)]
    if tied:
        assert torch.equal(
            after.get_output_embeddings().weight, after.get_input_embeddings().weight
        )
    with pytest.raises(UsageError, match="is no token of the vocabulary"):
        train(configured("other", adapter={"train_tokens": ["no such token"]}))
