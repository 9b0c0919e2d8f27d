"""Stories of cards without bf16 (T4, V100, RTX 20, GTX 16): fp16 with layers in fp32, QLoRA in fp16,
loss scaling with LoRA.
"""

import json
import math

import pytest
import torch
from tests.api import find_layers, find_overflowing_layers, load_run, use_fp32_layers
from tests.models import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from isotype import optimize
from isotype.config.load import load
from isotype.doctor.explain import explain
from isotype.errors import PreflightError
from isotype.inference.merge import merge
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.choose import train

IDS = torch.arange(3, 35).view(2, 16)


def enlarge(layer, factor: float) -> None:
    """Makes the MLP of a layer return values that pass fp16's largest number."""
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(factor**0.5)
        layer.mlp.down_proj.weight.mul_(factor)


def with_adapter(model, preset: str, *, is_fused: bool = True):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if is_fused:
        optimize(adapted, PRESETS[preset])
    apply_precision(adapted, PRESETS[preset], device_type="cpu")
    return adapted.train()


def gradients(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    (loss * 64).backward()
    grads = {n: p.grad.double() / 64 for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


@pytest.mark.parametrize("is_fused", [True, False], ids=["ops", "plain"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_only_layers_that_overflow_compute_in_fp32(layer, is_fused):
    def build(preset):
        model = tiny(num_hidden_layers=4)
        enlarge(model.model.layers[layer], 1e5)
        return with_adapter(model, preset, is_fused=is_fused)

    expected_loss, expected = gradients(build("fp32"))
    model = build("fp16-mixed")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = find_overflowing_layers(model, lambda: model(input_ids=IDS, labels=IDS))
    assert list(found) == [f"model.layers.{i}" for i in range(layer, 4)]
    assert min(found.values()) > 65504 / 2
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    frozen = {n: p.dtype for n, p in model.named_parameters() if not p.requires_grad}
    assert set(frozen.values()) == {torch.float16}
    assert not math.isfinite(float(model(input_ids=IDS, labels=IDS).loss.detach()))

    use_fp32_layers(model, found)
    loss, grads = gradients(model)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    for name, gradient in expected.items():
        assert float((grads[name] - gradient).norm()) <= 5e-3 * float(gradient.norm()), name
    wide = [n for n in frozen if model.get_parameter(n).dtype == torch.float32]
    assert {int(n.split("layers.")[1].split(".")[0]) for n in wide} == set(range(layer, 4))
    assert not torch.is_autocast_enabled("cpu")


def test_without_an_overflow_nothing_changes():
    model = with_adapter(tiny(), "fp16-mixed")
    assert find_overflowing_layers(model, lambda: model(input_ids=IDS, labels=IDS)) == {}


def test_an_overflow_inside_a_fused_op_is_found():
    """The product of gate and up passes 65504, and no module reads or returns it."""
    model = tiny(num_hidden_layers=2)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.mul_(3e3)
        model.model.layers[1].mlp.up_proj.weight.mul_(3e3)
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-7)
    optimize(model, PRESETS["fp16-mixed"])
    apply_precision(model, PRESETS["fp16-mixed"], device_type="cpu")
    found = find_overflowing_layers(model, lambda: model(input_ids=IDS, labels=IDS))
    assert list(found) == ["model.layers.1"]


class ExpertSum(torch.nn.Module):
    """Experts in a module list, as in models whose experts are separate modules."""

    def __init__(self, experts) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)

    def forward(self, hidden):
        return sum(expert(hidden) for expert in self.experts)


def test_a_layer_with_experts_computes_in_fp32_as_a_whole():
    def build(preset):
        model = tiny(num_hidden_layers=2)
        enlarge(model.model.layers[1], 1e5)
        for layer in model.model.layers:
            layer.mlp = ExpertSum([layer.mlp, type(layer.mlp)(model.config)])
        return with_adapter(model, preset, is_fused=False)

    expected_loss, _ = gradients(build("fp32"))
    model = build("fp16-mixed")
    assert list(find_layers(model)) == ["model.layers.0", "model.layers.1"]
    layers = find_overflowing_layers(model, lambda: model(input_ids=IDS, labels=IDS))
    assert list(layers) == ["model.layers.1"]
    use_fp32_layers(model, layers)
    loss, _ = gradients(model)
    assert loss == pytest.approx(expected_loss, rel=1e-3)


@pytest.fixture(scope="module")
def overflowing_gemma(workshop, tmp_path_factory):
    """A folder with a Gemma 3 whose last layer passes 65504."""
    folder = tmp_path_factory.mktemp("gemma")
    tokenizer = AutoTokenizer.from_pretrained(workshop.base)
    model = tiny(
        "gemma3_text",
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.no_grad():
        # Gemma's norm after the MLP multiplies by 1 + weight
        model.model.layers[2].post_feedforward_layernorm.weight.fill_(4e4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_gemma_in_fp16_trains_with_its_large_layer_in_fp32(
    configured, overflowing_gemma, tmp_path, capsys
):
    loaded = configured(
        "run",
        model={"name": str(overflowing_gemma)},
        precision={"preset": "fp16-mixed"},
        train={"steps": 3},
    )
    assert train(loaded) == 0
    run = tmp_path / "run"
    assert list(json.loads((run / "fp32_layers.json").read_text())["layers"]) == ["model.layers.2"]
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    (note,) = [note for note in notes if note.startswith("fp16: 1 of 3 layers")]
    assert "compute in fp32" in note
    assert "gemma3_text overflows in fp16" in capsys.readouterr().out
    record = json.loads((run / "precision.json").read_text())
    assert record["violations"] == []
    assert record["observed"]["compute"]["fp32"] > 0
    assert record["observed"]["compute"]["fp16"] > 0
    # what is loaded later computes in the same dtypes
    model = load_run(run).model
    ids = torch.tensor([[5, 6, 7]])
    assert bool(model(input_ids=ids).logits.isfinite().all())
    wide = model.get_base_model().model.layers[2].mlp.up_proj.base_layer.weight
    assert wide.dtype == torch.float32
    # fp16 would overflow in the merged model, and a program that reads "dtype" would use it
    merge(load_run(run), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.bfloat16
    assert bool(merged(input_ids=ids).logits.isfinite().all())


@pytest.mark.full
def test_a_resumed_run_keeps_its_layers_in_fp32(configured, overflowing_gemma, tmp_path):
    sections = {
        "model": {"name": str(overflowing_gemma)},
        "precision": {"preset": "fp16-mixed"},
    }
    # the first steps are skipped until the loss scale fits
    schedule = {"steps": 12, "schedule": "constant", "eval_every": 12}
    assert train(configured("whole", train=schedule, **sections)) == 0
    assert train(configured("parts", train={**schedule, "steps": 8}, **sections)) == 0
    resumed = load(tmp_path / "parts" / "resolved.yaml", ["train.steps=12"], resolved=True)
    assert train(resumed, resume=tmp_path / "parts") == 0
    one, two = (
        (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "parts")
    )
    assert one == two


def test_values_that_fp32_layers_do_not_help_refuse_the_run(configured, workshop, tmp_path, capsys):
    """The head's product overflows: it belongs to no decoder layer."""
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(workshop.base)
    with torch.no_grad():
        model.model.norm.weight.fill_(5e4)
        model.lm_head.weight.fill_(10.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(workshop.base).save_pretrained(folder)
    loaded = configured("run", model={"name": str(folder)}, precision={"preset": "fp16-mixed"})
    with pytest.raises(PreflightError, match=r"PF013 the loss is not finite(.|\n)*model\.norm"):
        train(loaded)


@pytest.mark.full
def test_qlora_in_fp16(configured, tmp_path):
    pytest.importorskip("bitsandbytes")
    precision = {"preset": "nf4-lora", "compute": "fp16", "loss_scaling": "dynamic"}
    assert train(configured("run", precision=precision, train={"steps": 2})) == 0
    record = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert record["violations"] == []
    assert set(record["observed"]["compute"]) == {"fp16"}
    assert record["observed"]["trainable"] == {"fp32": record["total"]["trainable"]}


@pytest.mark.full
def test_lora_with_loss_scaling_learns(configured, tmp_path):
    assert train(configured("run", precision={"preset": "fp16-mixed"})) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    record = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert record["violations"] == []
    assert record["observed"]["grads"] == {"fp32": record["total"]["grads"]}


@pytest.mark.parametrize(
    "card", ["GPU: Tesla T4, 15 GB", "device 0: compute capability 7.5", "arch sm_70"]
)
def test_a_scaler_with_bf16_weights_on_a_card_without_bf16(card):
    error = (
        'RuntimeError: "_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for'
        " 'BFloat16'"
    )
    (finding,) = explain([card, error])
    assert "fp32" in finding.fix
    assert "bf16=True" not in finding.fix
