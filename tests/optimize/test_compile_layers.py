"""Compiled decoder layers: the uncompiled step's results, one graph for all layers and lengths, and uncompiled where something looks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from isotype.errors import UsageError
from isotype.optimize import optimize, regions, restore
from isotype.optimize.layers import compile_layers
from isotype.precision.apply import _Narrow
from isotype.training.memory.plan import LiveBytes
from isotype.training.memory.recomputation import Checkpointing, apply_checkpointing, checkpointable
from tests.models import lora, quantised, tiny

BF16 = {"attn_implementation": "sdpa", "head_dim": 16}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    regions.compiled.cache_clear()
    counters.clear()
    yield
    regions.compiled.cache_clear()


@pytest.fixture
def traced(monkeypatch):
    """Graphs are traced as for Inductor, and run without it: seconds instead of half a minute."""
    real = torch.compile

    def without_inductor(function, *, options, **given):
        return real(function, backend="aot_eager", options={"guard_filter_fn": options["guard_filter_fn"]}, **given)

    monkeypatch.setattr(torch, "compile", without_inductor)


def model_of(family, *, bf16=False, checkpointing="none", optimized=True, layers=3, **changes):
    model = lora(tiny(family, num_hidden_layers=layers, **(BF16 if bf16 else {})), **changes).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
        elif bf16 and "lora_" not in name:
            p.data = p.data.to(torch.bfloat16)
    if optimized:
        optimize(model, "bf16" if bf16 else None)
    apply_checkpointing(model, Checkpointing(checkpointing, tuple(range(layers)) if checkpointing != "none" else (), layers))
    return model


def step(model, length=40, rows=2, bf16=False):
    model.zero_grad()
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(length))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(got, want, tolerance):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=0.0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert got[1][name].dtype == gradient.dtype
        assert (got[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("family", "checkpointing", "dropout"),
    [
        ("llama", "layers", 0.0),
        pytest.param("gemma2", "layers", 0.0, marks=pytest.mark.full),
    ],
)
def test_a_compiled_step_is_the_uncompiled_one_at_every_length(traced, family, checkpointing, dropout):
    model = model_of(family, checkpointing=checkpointing, lora_dropout=dropout)
    plain = copy.deepcopy(model)
    compile_layers(checkpointable(model))
    agree(step(model), step(plain), 1e-5)
    made = graphs()
    # the first layer's input needs no gradient; gemma2 alternates two kinds of attention, and dropout has one more
    assert made == 2 if family == "llama" and not dropout else made <= 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        agree(step(model, 56, 3), step(plain, 56, 3), 1e-5)
        agree(step(model, 72, 2), step(plain, 72, 2), 1e-5)
    assert graphs() == made


@pytest.mark.full
@pytest.mark.slow
def test_layers_over_a_4_bit_base_are_one_graph(traced):
    pytest.importorskip("bitsandbytes")
    base = tiny("llama", hidden_size=64, intermediate_size=128, **BF16).to(torch.bfloat16)
    model = lora(quantised(base)).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    optimize(model, "bf16")
    apply_checkpointing(model, Checkpointing("layers", (0, 1), 2))
    want = step(model, bf16=True)
    compile_layers(checkpointable(model))
    agree(step(model, bf16=True), want, 3e-2)
    step(model, 56, bf16=True)
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("bf16", [False, True])
def test_inductor_compiles_the_layers(bf16):
    model = model_of("llama", bf16=bf16, checkpointing="layers", lora_dropout=0.5)
    plain = copy.deepcopy(model)
    compile_layers(checkpointable(model))
    for length, rows in ((40, 2), (56, 3)):
        agree(step(model, length, rows, bf16), step(plain, length, rows, bf16), 3e-2 if bf16 else 1e-5)
    assert graphs() == 2


def test_names_of_weights_are_those_of_the_uncompiled_model(tmp_path):
    from safetensors import safe_open

    model = model_of("llama")
    names = list(model.state_dict())
    compile_layers(checkpointable(model))
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == 3 * 14
        assert not [name for name in file.keys() if "_orig_mod" in name]  # noqa: SIM118  # not a mapping


class Calls:
    """Stands for the compiler: notes whether a region was compiled, and runs it as it is."""

    def __init__(self):
        self.count = 0

    def __call__(self, function):
        def run(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return run


def test_what_looks_inside_a_layer_sees_it_uncompiled(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(regions, "compiled", calls)
    model = model_of("llama")
    compile_layers(checkpointable(model))

    def compiled_regions():
        calls.count = 0
        step(model)
        return calls.count

    assert compiled_regions() == 3
    with LiveBytes():
        assert compiled_regions() == 0
    inside = checkpointable(model)[1].mlp.register_forward_hook(lambda *_: None)
    assert compiled_regions() == 2
    inside.remove()
    # of the model's precision, which is put on before the first step and stays
    narrowing = checkpointable(model)[1].mlp.register_forward_hook(_Narrow(torch.float32))
    assert compiled_regions() == 3
    narrowing.remove()
    around = checkpointable(model)[1].register_forward_hook(lambda *_: None)
    assert compiled_regions() == 3
    around.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert compiled_regions() == 0
    everywhere.remove()
    calls.count = 0
    ids = torch.randint(3, 96, (1, 40))
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids)
    model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
    assert calls.count == 0
    model.train()
    restore(model)
    assert compiled_regions() == 0
    assert not any(regions.is_region(module) for module in model.modules())


def test_a_layer_that_is_not_one_graph_is_refused_with_the_reason(traced, monkeypatch):
    model = model_of("llama")
    compile_layers(checkpointable(model))
    mlp = type(checkpointable(model)[0].mlp)

    def waits(self, x):
        return self.down_proj(x[..., : self.up_proj.out_features] * float(x.sum().item() > 0))

    for layer in checkpointable(model):
        layer.mlp.forward = waits.__get__(layer.mlp, mlp)
    with pytest.raises(UsageError, match=r"model\.compile: layers: LlamaDecoderLayer is not one graph: ") as caught:
        step(model)
    assert caught.value.fix == "model.compile: none"
