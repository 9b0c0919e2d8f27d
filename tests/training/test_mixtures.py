"""Five families of mixtures: a run that was stopped and resumed is bit for bit the whole one, and its result merges and generates."""

import pytest
import torch
from tests.models import MIXTURES, SIZES, rows, tiny
from tests.results import same_result, trained_tensors
from tests.training.interrupted import interrupted_after
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.config.schema import RunConfig
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.optimize import optimize
from isotype.tasks.choose import train
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import NextToken

SETTINGS = {"steps": 4, "batch_size": 2, "eval_every": 4, "gradient_checkpointing": "layers"}


@pytest.fixture
def mixture(workshop, configured, tmp_path):
    """`mixture(family, ...)`: the configuration of a run on a saved tiny model of this family."""

    def make(family, folder="run", **sections):
        base = tmp_path / family
        if not base.exists():
            tokenizer = AutoTokenizer.from_pretrained(workshop.base)
            sizes = {name: value for name, value in SIZES.items() if not name.endswith("_id")}
            ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
            tiny(family, **{**sizes, **MIXTURES[family], "vocab_size": len(tokenizer), **ids}).save_pretrained(base)
            tokenizer.save_pretrained(base)
        train_section = SETTINGS | sections.pop("train", {})
        return configured(folder, model={"name": str(base)}, train=train_section, precision={"preset": "bf16-lora"}, **sections)

    return make


# the two forms that differ most: biases, transposed, a gate of its own; a dense layer and a shared expert
DEFAULT = ("gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full) for name in MIXTURES])
def test_a_mixture_trains_resumes_merges_and_generates(mixture, tmp_path, monkeypatch, capsys, family):
    # DeepSeek-V3 balances by a bias
    balanced = {"train": {} if family == "deepseek_v3" else {"aux_loss": 0.5}}
    assert train(mixture(family, "whole", **balanced)) == 0
    said = capsys.readouterr().out
    assert "experts    experts" in said
    assert "left alone" not in said
    assert interrupted_after(2, mixture(family, "stopped", run={"save_every": 2}, **balanced), monkeypatch) == 130
    assert train(mixture(family, "stopped", **balanced), resume=tmp_path / "stopped") == 0
    same_result(tmp_path / "whole", tmp_path / "stopped")
    whole = trained_tensors(tmp_path / "whole")
    assert ('"aux_loss": ' in (tmp_path / "whole/metrics.jsonl").read_text()) == (family != "deepseek_v3")
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
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
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
            torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    model.eval()
    assert objective.loss_sum(model, batch, batch.weight, dtype="fp32")[0] < loss
