"""Adapters: targets, modules trained in full, and tokens that a tokenizer did not have."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.config.load import load
from isotype.config.schema import AdapterSection
from isotype.environment.hardware import detect
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.model.adapter import attach_adapter, check_lora_branch, load_adapter, save_adapter
from isotype.model.build import resolve_precision
from isotype.tasks.choose import train
from isotype.tasks.language.outline import outline_model
from tests.api import lora_layers, read_projection, trained_tensors
from tests.models import SIZES, tiny


def resolved(*settings, preset="bf16-lora"):
    loaded = load(None, ["model.lora_branch=fp32", *settings], preset=preset)
    return loaded.config, resolve_precision(loaded.config, loaded.sources, detect("cpu")).precision


def test_every_adapter_of_a_run_has_its_branch_in_fp32():
    config, precision = resolved("model.lora_branch=fp32")
    check_lora_branch(config, precision)
    made = outline_model(tiny("llama").config, config, precision, device_type="cpu")
    layers = [layer for _, layer in lora_layers(made.model)]
    assert [read_projection(layer, layer.weight).dtype_key[-1] for layer in layers] == [True] * 14


def test_all_linear_of_a_mamba_is_what_its_mixer_calls():
    model = attach_adapter(tiny("mamba", state_size=4), AdapterSection(r=2), seed=0)
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {"in_proj"}
    ids = torch.arange(3, 20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_dropout_that_peft_refuses_on_parameters_is_answered_with_what_helps():
    # of an older checkpoint's experts, which PEFT takes for the stacks
    named = ["gate_proj", "up_proj", "down_proj"]
    with pytest.raises(UsageError, match="for which PEFT has no dropout") as caught:
        attach_adapter(tiny("qwen3_moe"), AdapterSection(r=2, dropout=0.1, targets=named), seed=0)
    assert str(caught.value.fix).startswith("leave adapter.dropout out")
    names = [
        name
        for name, _ in attach_adapter(
            tiny("qwen3_moe"), AdapterSection(r=2, targets=named), seed=0
        ).named_parameters()
    ]
    assert sum("experts" in name and "lora_A" in name for name in names) == 4


def test_peft_that_cannot_read_packed_experts_is_named(monkeypatch):
    """PEFT 0.20 reads the sizes of a packed parameter from the shape of its bytes."""

    def get_peft_model(model, config):
        return (8,)[1]

    monkeypatch.setattr("peft.get_peft_model", get_peft_model)
    monkeypatch.setattr("isotype.model.adapter.version", lambda package: "0.20.0")
    with pytest.raises(UsageError, match="cannot adapt packed experts") as error:
        attach_adapter(tiny("qwen3_moe"), AdapterSection(r=2), seed=0)
    assert "peft>=0.21" in str(error.value.fix)
    with pytest.raises(IndexError):  # another fault of PEFT is not hidden
        attach_adapter(tiny("llama"), AdapterSection(r=2), seed=0)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_modules_trained_in_full_are_loaded_as_they_were_saved_on_a_narrower_base(tmp_path, tied):
    section = AdapterSection(r=2, modules_to_save=["embed_tokens", "lm_head"])
    precision = resolved()[1]
    model = attach_adapter(tiny(tie_word_embeddings=tied).bfloat16(), section, seed=0).float()
    with torch.no_grad():  # as a step does: fp32 values that bf16 lacks
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.rand_like(parameter) * 0.01)
    save_adapter(model, tmp_path, precision)
    loaded = load_adapter(tiny(tie_word_embeddings=tied).bfloat16(), tmp_path)
    found = dict(loaded.named_parameters(remove_duplicate=False))
    trained = trained_tensors(model)
    assert sum(".modules_to_save." in name for name in trained) == 2
    for name, parameter in trained.items():
        assert torch.equal(found[name].float(), parameter), name
    assert full_head_is_embedding(found) == full_head_is_embedding(trained)


def full_head_is_embedding(parameters):
    head, embedding = (p for name, p in sorted(parameters.items()) if ".modules_to_save." in name)
    return head is embedding


# --- Tokens that a tokenizer did not have: trained, saved, loaded again and merged, with one
# embedding and head or two.


TOKENS = ["<think>", "</think>"]


def base_with(workshop, folder, *, tied):
    """The workshop's tokenizer, and a model with or without a head of its own."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    sizes = {k: v for k, v in SIZES.items() if not k.endswith("_id")} | {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": tied,
    }
    tiny(
        **sizes,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("lora", True),
        pytest.param("lora", False, marks=pytest.mark.full),
        pytest.param("none", True, marks=pytest.mark.full),
    ],
)
def test_new_tokens_are_trained_saved_and_merged(configured, workshop, tmp_path, kind, tied):
    before = base_with(workshop, tmp_path / "plain", tied=tied)
    rows = [json.loads(line) for line in workshop.chats.read_text().splitlines()]
    for row in rows:
        row["messages"][1]["content"] = "<think></think>" + row["messages"][1]["content"]
    (tmp_path / "thinking.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"name": str(tmp_path / "plain"), "add_tokens": TOKENS},
        "data": {"train": str(tmp_path / "thinking.jsonl")},
    }
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
    mean = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        .get_input_embeddings()
        .weight.float()
        .mean(0)
    )
    trained = [
        p
        for name, p in inner.named_parameters()
        if p.shape[0] == before + 2 and ".original_module." not in name
    ]
    assert len({id(p) for p in trained}) == (1 if tied else 2)
    assert all((p[before:] - mean).abs().max() > 1e-3 for p in trained if p is trained[0])
    logits = plain(ids).logits

    loaded = load_run(run)
    assert torch.allclose(loaded.model(ids, use_cache=False).logits, logits, atol=1e-4)
    if kind == "lora":
        merge(loaded, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.allclose(merged(ids).logits, logits, atol=1e-4)
