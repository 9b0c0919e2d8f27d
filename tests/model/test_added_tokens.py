"""Tokens that a tokenizer did not have: trained, saved, loaded again and merged, with one embedding and head or two."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.tasks.choose import train
from tests.models import SIZES, tiny

TOKENS = ["<think>", "</think>"]


def base_with(workshop, folder, *, tied):
    """The workshop's tokenizer, and a model with or without a head of its own."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_id")} | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied}
    tiny(**sizes, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("lora", True), pytest.param("lora", False, marks=pytest.mark.full), pytest.param("none", True, marks=pytest.mark.full)],
)
def test_new_tokens_are_trained_saved_and_merged(configured, workshop, tmp_path, kind, tied):
    before = base_with(workshop, tmp_path / "plain", tied=tied)
    rows = [json.loads(line) for line in workshop.chats.read_text().splitlines()]
    for row in rows:
        row["messages"][1]["content"] = "<think></think>" + row["messages"][1]["content"]
    (tmp_path / "thinking.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": {"name": str(tmp_path / "plain"), "add_tokens": TOKENS}, "data": {"train": str(tmp_path / "thinking.jsonl")}}
    assert train(configured(**settings, adapter={"kind": kind}, train={"learning_rate": 1e-2})) == 0
    run = tmp_path / "run"
    findings = json.loads((run / "preflight.json").read_text())["findings"]
    assert not findings

    result = run / ("adapter" if kind == "lora" else "model")
    tokenizer = AutoTokenizer.from_pretrained(result)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [before, before + 1]
    base = AutoModelForCausalLM.from_pretrained(run / "base" if kind == "lora" else result)
    assert base.get_input_embeddings().weight.shape[0] == before + 2
    plain = PeftModel.from_pretrained(base, result) if kind == "lora" else base
    ids = torch.tensor([tokenizer("How much is 1 plus 1?<think></think>").input_ids])
    inner = plain.get_base_model() if kind == "lora" else plain
    mean = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").get_input_embeddings().weight.float().mean(0)
    trained = [p for name, p in inner.named_parameters() if p.shape[0] == before + 2 and ".original_module." not in name]
    assert len({id(p) for p in trained}) == (1 if tied else 2)
    assert all((p[before:] - mean).abs().max() > 1e-3 for p in trained if p is trained[0])
    logits = plain(ids).logits

    loaded = load_run(run)
    assert torch.allclose(loaded.model(ids, use_cache=False).logits, logits, atol=1e-4)
    if kind == "lora":
        merge(loaded, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(ids).logits, logits, atol=1e-4)
