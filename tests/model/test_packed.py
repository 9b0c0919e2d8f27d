"""Checkpoints as they are published, from the folder to gradients and the merged model, against
fp64 of the weights that the files mean.
"""

import json
import re
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype import optimize
from isotype.config.schema import AdapterSection
from isotype.environment.hardware import detect
from isotype.errors import UsageError
from isotype.inference.loaded import load_run
from isotype.inference.merge import merge, merged_state
from isotype.lora import PackedLinear
from isotype.model.adapter import attach_adapter, refuse_packed_experts_without_ops, save_adapter
from isotype.model.load import Source, load_base
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.choose import train
from isotype.tasks.language.task import flops_per_token
from tests.api import (
    Quantisation,
    dequantise_packed,
    detect_quantisation,
    refuse_unknown_parameters,
    target_notes,
)
from tests.commands import ask, invoke
from tests.models import lora, tiny
from tests.published import FORMATS, write, write_experts

LANDED = ("fp8-block", "fp8-ct-channel")
# the others differ in what tests/ops/test_packed.py compares for all of them
ONE_OF_EACH = ("fp8-block", "int8-bnb", "int4-ct-packed", "gptq-act-order", "awq", "nvfp4-ct")


def marked(default):
    return [
        form if form in default else pytest.param(form, marks=pytest.mark.full) for form in FORMATS
    ]


BF16 = PRESETS["bf16-lora"]


@pytest.fixture(scope="module")
def published(tmp_path_factory, workshop):
    """`published(form)`: the folder of a tiny Llama whose sizes are no multiples of the blocks."""
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = tiny(hidden_size=64, intermediate_size=80, vocab_size=len(tokenizer), **ids)
    folder = tmp_path_factory.mktemp("published")

    def make(form: str):
        if not (folder / form).exists():
            write(model, tokenizer, folder / form, form)
        return folder / form

    return make


def load(folder):
    """(the model, its precision) of a folder that is named by its format."""
    base = BF16.but(base=FORMATS[folder.name][0])
    return load_base(
        Source(str(folder)), base, attention="auto", device=torch.device("cpu"), trainable=False
    ), base


def dense(model, dtype):
    """The plain model with the weights that a packed one's files mean."""
    state = {
        n: p.data
        if getattr(p, "quant_state", None) is None
        else dequantise_packed(p, p.quant_state, torch.float64)
        for n, p in model.named_parameters()
    }
    plain = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    plain.load_state_dict(dict(model.named_buffers()) | state, strict=False)
    return plain.requires_grad_(False)


def adapted(model, precision):
    """With the adapters of everyone else's, none of which is zero."""
    adapters = lora(model)
    for n, p in sorted(adapters.named_parameters()):
        if "lora_" in n:
            p.data = (
                torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(len(n)), dtype=torch.float64
                )
                .mul(0.05)
                .to(p.dtype)
            )
    if precision is not None:
        optimize(adapters, precision)
        apply_precision(adapters, precision, device_type="cpu")
    return adapters


def step(model, ids):
    logits = model(input_ids=ids, labels=ids).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).to(torch.float64), ids[:, 1:].flatten()
    )
    loss.backward()
    return logits.detach().double(), {
        n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None
    }


def user(settings: list[str], command: str = "plan"):
    """A command as a user gives it; the error of one line and a fix, or None."""
    done = invoke(command, *settings)
    assert done.exception is None or isinstance(done.exception, UsageError | SystemExit), (
        done.exception
    )
    return done.exception


def off(got, exact):
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("form", marked(ONE_OF_EACH))
def test_logits_and_gradients_are_as_near_as_those_of_the_dense_weights(published, form):
    ids = torch.arange(3, 51).view(2, 24)
    model, precision = load(published(form))
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
        sections = {
            "model": {"name": str(published(form))},
            "precision": {"preset": "auto"},
            "train": {"steps": 2},
            **sections,
        }
        return train(configured(folder, **sections))

    return run


@pytest.mark.parametrize("form", marked(LANDED[:1]))
def test_a_published_checkpoint_is_trained_resumed_and_merged(form, trained, tmp_path):
    word = FORMATS[form][0]
    trained(form)
    run = tmp_path / "run"
    observed = json.loads((run / "precision.json").read_text())
    # fp32 on a CPU without bf16 instructions
    preset = "bf16-lora" if detect("cpu").bf16 == "native" else "fp32"
    rest = PRESETS[preset].compute
    assert observed["precision"] == f"{preset} base={word}"
    assert observed["observed"]["base"] == {word: 14, rest: 7}
    assert observed["declared"]["base"]["rest"] == rest
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert any(note.startswith(f"the base came quantised: {word}") for note in notes)
    ask("train", "--resume", run, "train.steps=3")
    loaded = load_run(run)
    assert merge(loaded, tmp_path / "merged").dtype == rest
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("form", marked(LANDED[1:]))
def test_a_merged_weight_is_the_sum_in_fp32(form, published):
    model, _ = load(published(form))
    exact = adapted(dense(model, torch.float64), None).double()
    state, _, count = merged_state(adapted(model, None), torch.float32)
    assert count == 14
    assert all(t.dtype == torch.float32 for t in state.values())
    expected = exact.merge_and_unload().state_dict()
    for name, value in state.items():
        assert off(value.double(), expected[name]) <= 2e-5, name


def test_settings_that_a_packed_base_cannot_keep_are_refused(published, workshop, subtests):
    for setting, message in {
        "adapter.kind=none": r"PR003(.|\n)*adapter\.kind: lora",
        "adapter.modules_to_save=[q_proj]": r"q_proj\.weight was saved quantised",
        "precision.base=int8": "its weights are fp8 already, declared base int8",
        "precision.preset=bf16-lora": "its weights are fp8 already, declared base bf16",
        "precision.compute=fp8": "fp8 products are refused until",
        "adapter.dora=true": "q_proj is packed, and PEFT takes DoRA's lengths off dense",
    }.items():
        with subtests.test(setting):
            error = user(
                ["--model", str(published("fp8-block")), "--data", str(workshop.chats), setting]
            )
            assert re.search(message, str(error)), error
            assert error.exit_status == 2


def test_a_damaged_file_is_named_before_anything_is_trained(published, workshop, tmp_path):
    folder = shutil.copytree(published("fp8-ct-channel"), tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = user(
        ["--data", str(workshop.chats), "--model", str(folder), f"run.folder={tmp_path / 'run'}"],
        "train",
    )
    assert "model.layers.1.mlp.up_proj.weight_scale is not finite at [3, 0]" in str(error)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    error = user(["--data", str(workshop.chats), "--model", str(folder)])
    assert re.search(
        r"model\.layers\.1\.mlp\.up_proj\.weight is float8_e4m3fn and has no scale", str(error)
    )


UP = "model.layers.1.mlp.up_proj"


# form, and the tensor to leave out, another in its place, settings to change, or no settings
DAMAGED = (
    ("int4-ct-asymmetric", "weight_zero_point", f"{UP}.weight_zero_point is missing"),
    ("gptq-act-order", "g_idx", f"{UP}.g_idx is missing"),
    ("nvfp4-ct", "weight_global_scale", f"{UP}.weight_global_scale is missing"),
    (
        "nvfp4-modelopt",
        lambda t: t[f"{UP}.weight_scale_2"].expand(2),
        f"{UP}.weight_scale_2 is [2], expected [1]",
    ),
    (
        "int8-torchao-group",
        lambda t: t[f"{UP}._weight_zero_point"][:40],
        f"{UP}.weight_zero_point is [40, 4], expected [80, 4]",
    ),
    ("gptq", {"group_size": 0}, "quantization_config: ValueError: group_size: 0"),
    (
        "fp8-block",
        None,
        "weight_scale_inv belongs to a packed weight, and config.json has no quantization_config",
    ),
)


def test_damaged_files_that_would_be_read_wrong_are_named(published, workshop, tmp_path, subtests):
    for form, change, message in DAMAGED:
        with subtests.test(form):
            error = of_damaged(published(form), change, workshop, tmp_path / form)
            assert message in str(error)
            assert error.exit_status == 2


def of_damaged(whole, change, workshop, place):
    folder = shutil.copytree(whole, place)
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    if change is None:
        del config["quantization_config"]
    elif isinstance(change, dict):
        config["quantization_config"] |= change
    elif isinstance(change, str):
        del tensors[f"{UP}.{change}"]
    else:
        name = next(
            name
            for name in tensors
            if name.startswith(UP) and re.search(r"scale_2$|_zero_point$", name)
        )
        tensors[name] = change(tensors).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return user(
        ["--data", str(workshop.chats), "--model", str(folder), f"run.folder={place / 'run'}"],
        "train",
    )


@pytest.mark.parametrize("word", ["fp8", pytest.param("int8", marks=pytest.mark.full)])
def test_a_base_is_quantised_when_it_is_loaded(word, configured, workshop, tmp_path):
    assert (
        train(configured(precision={"preset": "bf16-lora", "base": word}, train={"steps": 2})) == 0
    )
    observed = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert observed["observed"]["base"] == {word: 14, "bf16": 7}
    assert observed["violations"] == []
    model = load_run(tmp_path / "run").model
    plain = AutoModelForCausalLM.from_pretrained(workshop.base, dtype=torch.float32)
    for name, layer in model.named_modules():
        if type(layer) is PackedLinear:
            wide = dequantise_packed(layer.weight, layer.weight.quant_state, torch.float32)
            exact = plain.get_submodule(
                name.removeprefix("base_model.model.").removesuffix(".base_layer")
            ).weight
            most = exact.abs().amax(1, keepdim=True)
            # half a step: of 2 ** -3 of a value in e4m3, or of its smallest; of 1/127 of the row's
            # largest in int8
            step = exact.abs() / 16 + most / 448 / 512 if word == "fp8" else most / 254
            assert ((wide - exact).abs() <= 1.01 * step + exact.abs() / 256).all(), name


def test_held_bytes_are_the_files(published):
    for form in FORMATS:
        folder = published(form)
        model, _ = load(folder)
        held = 0
        for p in model.parameters():
            state = getattr(p, "quant_state", None)
            held += p.nbytes + sum(
                t.nbytes for t in (state.tensors.values() if state is not None else ())
            )
        in_file = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
        assert held <= 1.15 * in_file, form


MIXTURES = {
    "gpt-oss": ("gpt_oss", "mxfp4", {"num_local_experts": 4, "head_dim": 16, "sliding_window": 16}),
    "qwen3-moe": (
        "qwen3_moe",
        "fp8-block",
        {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "mlp_only_layers": []},
    ),
    "deepseek": ("deepseek_v3", "fp8-block", {"moe_intermediate_size": 48}),
    "qwen3-moe gptq": (
        "qwen3_moe",
        "gptq-v2",
        {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "mlp_only_layers": []},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gpt-oss", "deepseek") else pytest.param(name, marks=pytest.mark.full)
        for name in MIXTURES
    ],
)
def test_adapters_on_packed_experts_are_right_and_load_with_peft(name, tmp_path):
    family, form, sizes = MIXTURES[name]
    tied = {"tie_word_embeddings": False, "num_experts_per_tok": 2}
    model = tiny(family, hidden_size=64, intermediate_size=96, **sizes, **tied)
    write_experts(model, tmp_path / "mixture", form, layers=family == "deepseek_v3")
    word = "mxfp4" if form == "mxfp4" else FORMATS[form][0]
    precision = PRESETS["fp32"].but(base=word)
    model = load_base(
        Source(str(tmp_path / "mixture")),
        precision,
        attention="eager",
        device=torch.device("cpu"),
        trainable=False,
    )
    experts = model.model.layers[1].mlp.experts
    assert experts.down_proj.quant_state.dtype_name == word
    exact = dense(model, torch.float64)
    refuse_unknown_parameters(model, ["experts.down_proj"])
    assert detect_quantisation(model) == Quantisation("", word, is_loaded=True)
    ids = torch.arange(3, 51).view(2, 24)
    exact.set_experts_implementation("eager")
    exact.config._attn_implementation = "eager"
    model.requires_grad_(False)
    assert flops_per_token(model, model.config) == flops_per_token(exact, exact.config), (
        "a token is sent to two experts, packed or not"
    )
    packed = attach_adapter(model, AdapterSection(r=4), seed=0)
    assert target_notes(packed, AdapterSection(r=4)) == []
    for n, p in sorted(packed.named_parameters()):
        if "lora_" in n:
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.05
    with pytest.raises(
        UsageError, match=r"model.optimize: false: .*\.mlp\.\S* is an adapter on packed experts"
    ):
        refuse_packed_experts_without_ops(packed)
    manifest = optimize(packed, precision)
    fused = [e.reason for e in manifest.entries if e.part == "experts"]
    assert set(fused) == {"with LoRA on down_proj and gate_up_proj"}
    save_adapter(packed, tmp_path / "adapter", precision)
    # PEFT's own code, on the dense weights that the file means
    reference = PeftModel.from_pretrained(
        exact, str(tmp_path / "adapter"), is_trainable=True
    ).double()
    logits, grads = step(packed, ids)
    exact_logits, exact_grads = step(reference, ids)
    assert off(logits, exact_logits) < 1e-4
    assert grads.keys() == exact_grads.keys()
    assert sum(".experts." in n for n in grads) == 4 * len(fused)
    for n, grad in grads.items():
        assert off(grad, exact_grads[n]) < 1e-4, n
    state, _, count = merged_state(packed, torch.float32)
    assert count == len(grads) // 2
    merged = reference.merge_and_unload().state_dict()
    for n, value in state.items():
        assert (value.double() - merged[n]).norm() <= 2e-5 * merged[n].norm(), n
    packed.add_adapter("other", packed.peft_config["default"])
    packed.base_model.set_adapter(["default", "other"])
    with pytest.raises(
        UsageError, match="an adapter on packed experts: several adapters are active"
    ):
        packed(input_ids=ids)
