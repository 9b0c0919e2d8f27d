"""Checkpoints as they are published, from the folder to gradients and the merged model, against fp64 of the weights that the files mean."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from isotype import optimize
from isotype.cli.app import build_app
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge, merged_state
from isotype.lora import PackedLinear
from isotype.model.load import Source, load_base
from isotype.ops.packed import widen
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.choose import train
from tests.models import lora, tiny
from tests.published import FORMATS, write

LANDED = ("fp8-block", "fp8-ct-channel")
BF16 = PRESETS["bf16-lora"]


@pytest.fixture(scope="module")
def published(tmp_path_factory, workshop):
    """`published(form)`: the folder of a tiny Llama whose sizes are no multiples of the blocks."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model = tiny(hidden_size=64, intermediate_size=80, vocab_size=len(tokenizer), **ids)
    folder = tmp_path_factory.mktemp("published")

    def make(form: str, name: str = "", **options):
        made = folder / (name or form)
        if not made.exists():
            write(options.pop("model", model), tokenizer, made, form, **options)
        return made

    return make


def load(folder, **options):
    base = PRESETS["bf16-lora"].but(base=FORMATS[options.pop("form")][0])
    return load_base(Source(str(folder)), base, attention="auto", device=torch.device("cpu"), trainable=False, **options), base


def dense(model, dtype):
    """The plain model with the weights that a packed one's files mean."""
    state = {
        n: p.data if getattr(p, "quant_state", None) is None else widen(p, p.quant_state, torch.float64)
        for n, p in model.named_parameters()
    }
    plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    plain.load_state_dict(state)
    return plain.requires_grad_(False)


def adapted(model, precision):
    """With the adapters of everyone else's, none of which is zero."""
    adapters = lora(model)
    for n, p in sorted(adapters.named_parameters()):
        if "lora_" in n:
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n)), dtype=torch.float64).mul(0.05).to(p.dtype)
    if precision is not None:
        optimize(adapters, precision)
        apply_precision(adapters, precision, device_type="cpu")
    return adapters


def step(model, ids):
    logits = model(input_ids=ids, labels=ids).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.float64), ids[:, 1:].flatten())
    loss.backward()
    return logits.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def off(got, exact):
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("form", FORMATS)
def test_logits_and_gradients_are_as_near_as_those_of_the_dense_weights(published, form):
    ids = torch.arange(3, 51).view(2, 24)
    model, precision = load(published(form), form=form)
    plain, exact = dense(model, torch.bfloat16), dense(model, torch.float64)
    assert sum(type(m) is PackedLinear for m in model.modules()) == 14
    logits, grads = step(adapted(model, precision), ids)
    plain_logits, plain_grads = step(adapted(plain, BF16), ids)
    exact_logits, exact_grads = step(adapted(exact, None).double(), ids)
    assert off(logits, exact_logits) <= 1.5 * off(plain_logits, exact_logits)
    assert grads.keys() == exact_grads.keys()
    for n, grad in grads.items():
        assert off(grad, exact_grads[n]) <= 1.5 * off(plain_grads[n], exact_grads[n]) + 1e-3, n


@pytest.fixture
def trained(configured, published):
    def run(form: str, folder: str = "run", **sections):
        sections = {"model": {"name": str(published(form))}, "precision": {"preset": "auto"}, "train": {"steps": 2}, **sections}
        return train(configured(folder, **sections))

    return run


@pytest.mark.parametrize("form", [f if f in LANDED else pytest.param(f, marks=pytest.mark.full) for f in FORMATS])
def test_a_published_checkpoint_is_trained_resumed_and_merged(form, trained, tmp_path):
    word = FORMATS[form][0]
    trained(form)
    run = tmp_path / "run"
    observed = json.loads((run / "precision.json").read_text())
    assert observed["precision"] == f"bf16-lora base={word}"
    assert observed["observed"]["base"] == {word: 14, "bf16": 7}
    assert observed["declared"]["base"]["rest"] == "bf16"
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert any(note.startswith(f"the base came quantised: {word}") for note in notes)
    resumed = CliRunner().invoke(build_app(), ["train", "--resume", str(run), "train.steps=3"], catch_exceptions=False)
    assert resumed.exit_code == 0
    loaded = load_run(run)
    assert merge(loaded, tmp_path / "merged").dtype == "bf16"
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("form", [f if f in LANDED else pytest.param(f, marks=pytest.mark.full) for f in FORMATS])
def test_a_merged_weight_is_the_sum_in_fp32(form, published):
    model, _ = load(published(form), form=form)
    exact = adapted(dense(model, torch.float64), None).double()
    state, _, count = merged_state(adapted(model, None), torch.float32)
    assert count == 14
    assert all(t.dtype == torch.float32 for t in state.values())
    expected = exact.merge_and_unload().state_dict()
    for name, value in state.items():
        assert off(value.double(), expected[name]) <= 2e-5, name


def test_held_bytes_are_the_files(published):
    for form in FORMATS:
        folder = published(form)
        model, _ = load(folder, form=form)
        held = 0
        for p in model.parameters():
            state = getattr(p, "quant_state", None)
            held += p.nbytes + sum(t.nbytes for t in (state.tensors.values() if state is not None else ()))
        in_file = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
        assert held <= 1.15 * in_file, form


def test_an_adapter_loads_with_peft_on_the_same_checkpoint(trained, published, tmp_path):
    """Under the names of a plain model's adapter, whatever loads the base."""
    import peft

    trained("fp8-ct-channel")
    base = dense(load(published("fp8-ct-channel"), form="fp8-ct-channel")[0], torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    assert len([n for n, p in loaded.named_parameters() if "lora_B" in n and p.abs().max() > 0]) == 14
