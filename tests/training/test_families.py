"""Families: each trains under its declaration; mixtures of experts are resumed bit for bit, merged,
and generate.
"""

import re
from itertools import cycle

import pytest
import torch
from tests.models import FAMILIES, MIXTURES, lora, rows, save_with_tokenizer, stepper, tiny
from tests.results import same_result, trained_tensors
from tests.training.interrupted import interrupted_after
from transformers import AutoModelForCausalLM

from isotype.config.schema import RunConfig
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.observe import Observer
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.tasks.choose import train
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import NextToken

SETTINGS = {"steps": 4, "batch_size": 2, "eval_every": 4, "gradient_checkpointing": "layers"}


@pytest.fixture
def mixture(workshop, configured, tmp_path):
    """`mixture(family, ...)`: the configuration of a run on a saved tiny model of this family."""

    def make(family, folder="run", **sections):
        base = save_with_tokenizer(family, workshop.base, tmp_path / family)
        train_section = SETTINGS | sections.pop("train", {})
        return configured(
            folder,
            model={"name": str(base)},
            train=train_section,
            precision={"preset": "bf16-lora"},
            **sections,
        )

    return make


# the form that differs most: biases, transposed, a gate of its own
DEFAULT = ("gpt_oss",)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full) for name in MIXTURES],
)
def test_a_mixture_trains_resumes_merges_and_generates(mixture, tmp_path, monkeypatch, family):
    # DeepSeek-V3 balances by a bias
    balance = {} if family == "deepseek_v3" else {"aux_loss": 0.5}
    balanced = {"train": {"steps": 2, "eval_every": 2} | balance}
    assert train(mixture(family, "whole", **balanced)) == 0
    said = (tmp_path / "whole/log.txt").read_text()
    assert "experts    experts" in said
    assert "left alone" not in said
    assert (
        interrupted_after(
            1, mixture(family, "stopped", run={"save_every": 1}, **balanced), monkeypatch
        )
        == 130
    )
    assert train(mixture(family, "stopped", **balanced), resume=tmp_path / "stopped") == 0
    same_result(tmp_path / "whole", tmp_path / "stopped")
    whole = trained_tensors(tmp_path / "whole")
    assert ('"aux_loss": ' in (tmp_path / "whole/metrics.jsonl").read_text()) == (
        family != "deepseek_v3"
    )
    assert any(".experts." in name and "lora_B" in name and whole[name].any() for name in whole)
    merged = merge(load_run(tmp_path / "whole"), tmp_path / "merged")
    assert merged.merged_loss == pytest.approx(merged.adapter_loss, rel=1e-2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert model.generate(torch.arange(3, 9)[None], max_new_tokens=3, do_sample=False).shape[1] > 6


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_the_balancing_loss_is_the_familys_own(family):
    """transformers adds it to the loss of a model that is given labels; padding counts in neither."""
    model = tiny(family).train()
    batch = collate(rows(4), pad_id=0)
    objective = NextToken(RunConfig.model_validate({"train": {"aux_loss": 0.3}}))
    objective.check_model(model)
    model.router_aux_loss_coef = 0.3
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "labels": batch.labels,
    }
    theirs = model(**inputs, output_router_logits=True)
    theirs.loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    optimize(model)
    loss, aux = objective.loss_sum(model, batch, batch.weight, dtype="fp32")
    loss.backward()
    torch.testing.assert_close(loss, theirs.loss)
    torch.testing.assert_close(aux, theirs.aux_loss)
    for name, p in model.named_parameters():
        if name in want:
            torch.testing.assert_close(
                p.grad, want[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
    model.eval()
    assert objective.loss_sum(model, batch, batch.weight, dtype="fp32")[0] < loss


# --- Every supported family trains under its declaration, and adapters go both ways between Isotype
# and plain PEFT.


BATCH = collate(rows(4), pad_id=0)


# one of the two presets by turns
@pytest.mark.parametrize(
    ("family", "preset"), list(zip(FAMILIES, cycle(["bf16-lora", "bf16-mixed"])))
)
def test_a_family_trains_and_generates_under_its_declaration(family, preset):
    model = lora(tiny(family)) if preset == "bf16-lora" else tiny(family)
    step = stepper(model, preset, learning_rate=1e-2)
    observer = Observer(model, PRESETS[preset])
    with observer.watch(1) as seen:
        first = step([BATCH], step=1, learning_rate=1e-2, watch_changes=True)
    observer.observe_tensors(seen, states=lambda p: step.optimizer.state[p]).raise_if_violated()
    # the router of a mixture gives its scores in fp32, in its class's own code
    assert not [
        module
        for module, _ in seen.promotions
        if not re.search(r"\.mlp\.gate(\.base_layer)?$", module)
    ], seen.promotions
    for number in range(2, 8):
        last = step([BATCH], step=number, learning_rate=1e-2, watch_changes=False)
    assert last.loss < first.loss
    model.eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=BATCH.input_ids[:1, :5],
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert out.shape == (1, 8)
