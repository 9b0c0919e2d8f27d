"""What is saved is what was trained, tied or not, with its own code or without."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype.inference.loaded import load_run
from isotype.inference.merge import merge
from isotype.runs.folder import TRUST_VARIABLE
from isotype.tasks.choose import train
from tests.models import lora

TOKENS = torch.arange(3, 20)[None]


@pytest.fixture
def tied_base(workshop, tmp_path):
    """The workshop's base with the embedding as its head."""
    folder = tmp_path / "tied"
    shutil.copytree(workshop.base, folder)
    model = AutoModelForCausalLM.from_pretrained(
        workshop.base, dtype=torch.float32, tie_word_embeddings=True
    )
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    return folder


def adapter_on(base, folder, **settings):
    """A PEFT folder with random weights, also in the head where `modules_to_save` has it; and its
    logits.
    """
    model = lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        return model.eval()(input_ids=TOKENS).logits


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def as_engines_read(folder):
    """Logits by an engine that obeys config.json: with `tie_word_embeddings: true` the head in the
    file is not looked at.
    """
    state = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = (
        state["model.embed_tokens.weight"]
        if config_of(folder)["tie_word_embeddings"]
        else state["lm_head.weight"]
    )
    model.lm_head.weight = torch.nn.Parameter(head.float())
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def test_a_merged_head_that_is_no_longer_the_embedding_is_not_called_tied(tied_base, tmp_path):
    expected = adapter_on(
        tied_base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"]
    )
    merge(load_run(tmp_path / "adapter"), tmp_path / "merged")
    assert config_of(tmp_path / "merged")["tie_word_embeddings"] is False
    torch.testing.assert_close(as_engines_read(tmp_path / "merged"), expected, atol=1e-5, rtol=1e-5)


def test_full_fine_tuning_stores_a_tied_head_once(tied_base, configured, tmp_path):
    sections = {
        "model": {"name": str(tied_base)},
        "adapter": {"kind": "none"},
        "precision": {"preset": "fp32", "save": "bf16"},
    }
    assert train(configured(train={"steps": 2}, **sections)) == 0
    assert config_of(tmp_path / "run/model")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "run/model/model.safetensors")


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.full), "lora"])
def test_a_result_ends_where_its_answers_end(workshop, configured, tmp_path, kind):
    """With a named template the tokenizer's end token is the template's: `generate` of the saved
    and of the merged model stops there.
    """
    base = tmp_path / "base"
    shutil.copytree(workshop.base, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    end, old = tokenizer.eos_token_id, tokenizer.pad_token_id
    tokenizer.eos_token, tokenizer.chat_template = tokenizer.pad_token, None
    tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.eos_token_id = model.generation_config.eos_token_id = old
    model.save_pretrained(base)
    sections = {
        "model": {"name": str(base)},
        "data": {"chat_template": "chatml"},
        "adapter": {"kind": kind},
    }
    assert train(configured(train={"steps": 2}, **sections)) == 0
    result = tmp_path / "run/model"
    if kind == "lora":
        result = merge(load_run(tmp_path / "run"), tmp_path / "merged").folder
    saved = AutoModelForCausalLM.from_pretrained(result)
    assert saved.config.eos_token_id == end == AutoTokenizer.from_pretrained(result).eos_token_id
    assert saved.generation_config.eos_token_id == [end, old], (
        "the model's own end token still ends an answer"
    )


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(workshop, tmp_path, monkeypatch):
    """A base whose classes lie beside its weights."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    shutil.copytree(workshop.base, folder)
    (folder / "modeling_own.py").write_text(CODE)
    names = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    config = config_of(folder) | {
        "model_type": "own_llama",
        "architectures": ["OwnModel"],
        "auto_map": names,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.full), "lora"])
def test_a_model_with_its_own_code_is_trained_saved_and_loaded_again(
    with_code, configured, tmp_path, monkeypatch, kind
):
    model = {"name": str(with_code), "trust_remote_code": True}
    assert train(configured(model=model, adapter={"kind": kind}, train={"steps": 2})) == 0
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    run = load_run(tmp_path / "run")
    assert run.weights_name == ("model" if kind == "none" else "adapter")
    if kind == "lora":
        assert merge(run, tmp_path / "merged").dtype == "fp32"
        assert (tmp_path / "merged/modeling_own.py").is_file()
    else:
        assert AutoTokenizer.from_pretrained(tmp_path / "run/model")
