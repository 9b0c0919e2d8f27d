"""Adapters besides plain LoRA: DoRA, starts and LoKr on a denoiser."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file, save_file

from isotype.errors import UsageError
from isotype.inference.diffusion import merge_denoiser
from isotype.tasks.choose import train
from isotype.training.setup import check_adapters
from tests.tasks.diffusion.models import refused

CASES = [
    ("flux", {"dora": True}), ("sdxl", {"start": "pissa"}),
    pytest.param("sdxl", {"dora": True}, marks=pytest.mark.full),
    *(pytest.param("flux", {"start": start}, marks=pytest.mark.full) for start in ("orthogonal", "olora")),
]  # fmt: skip


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_a_dora_or_a_start_is_loaded_by_diffusers(drawn, studio, tmp_path, family, adapter):
    assert train(drawn(model=getattr(studio, family), adapter={"r": 4, **adapter})) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["check"]["trained_loss"] == pytest.approx(result["check"]["reloaded_loss"], abs=1e-6)
    assert (tmp_path / "run/adapter/pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize(("family", "factor"), [("flux", 4), pytest.param("sdxl", None, marks=pytest.mark.full)])
def test_a_lokr_is_pefts_and_comfyui_adds_what_was_trained(drawn, studio, tmp_path, capsys, family, factor):
    model, precision = getattr(studio, family), {"preset": "bf16-lora"}
    adapter = {"kind": "lokr", "r": 4, "alpha": 2.0, "factor": factor, "rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_q": 3.0}}
    assert train(drawn(model=model, adapter=adapter, precision=precision, run={"adapter_format": "comfyui"})) == 0
    assert "PF014" not in capsys.readouterr().out, "one factor begins at 0, so that the others get no gradient in step 1"
    assert json.loads((tmp_path / "run/precision.json").read_text())["violations"] == []
    part = "unet" if family == "sdxl" else "transformer"
    plain = getattr(DiffusionPipeline.from_pretrained(model), part)
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    merged = PeftModel.from_pretrained(plain, tmp_path / "run/adapter").merge_and_unload().state_dict()
    changed = {name: merged[name] - before[name] for name in before if not torch.equal(merged[name], before[name])}
    added = {
        name: delta for name, delta in as_comfyui_reads(load_file(tmp_path / "run/adapter/comfyui.safetensors")).items() if delta.any()
    }
    assert len(added) == len(changed) > 5
    for name, delta in changed.items():
        module = name.removesuffix(".weight")
        named = f"lora_unet_{module.replace('.', '_')}" if family == "sdxl" else f"transformer.{module}"
        torch.testing.assert_close(added[named], delta, rtol=1e-4, atol=1e-6)
    merge_denoiser(tmp_path / "run", tmp_path / "merged", dtype="fp32")
    ours = getattr(DiffusionPipeline.from_pretrained(tmp_path / "merged"), part).state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(ours[name], weight.to(torch.bfloat16).float() if name not in changed else weight, rtol=0.02, atol=0.01)


def as_comfyui_reads(tensors):
    """Module -> what is added to its weight, by ComfyUI's comfy/weight_adapter/lokr.py: without alpha the Kronecker product itself."""
    added = {}
    for module in {name.rpartition(".")[0] for name in tensors}:
        parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] == module}
        first, second = (parts.get(f"lokr_w{i}") for i in (1, 2))
        first = parts["lokr_w1_a"] @ parts["lokr_w1_b"] if first is None else first
        second = parts["lokr_w2_a"] @ parts["lokr_w2_b"] if second is None else second
        added[module] = torch.kron(first, second)
    return added


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"kind": "lokr", "dropout": 0.1}, "adapter.dropout: has no effect with adapter.kind: lokr"),
        ({"kind": "lora", "factor": 4}, "adapter.factor: has no effect with adapter.kind: lora"),
    ],
)
def test_what_the_other_kind_has_is_refused(drawn, adapter, said):
    with pytest.raises(UsageError, match=said):
        check_adapters(drawn(adapter=adapter).config)


def test_an_adapter_to_go_on_from_that_would_not_be_written_is_refused_before_training(drawn, studio, tmp_path):
    def begins(settings, adapter, **run):
        (tmp_path / "adapter_config.json").write_text(settings)
        return refused(drawn(adapter={"start_from": str(tmp_path), **adapter}, run=run))

    save_file({}, tmp_path / "adapter_model.safetensors")
    dora = json.dumps({"peft_type": "LORA", "use_dora": True})
    assert "a DoRA, which is not written for ComfyUI" in begins(dora, {}, adapter_format="comfyui")
    assert "is a lora, and adapter.kind is lokr" in begins(dora, {"kind": "lokr"})
    assert "is a lokr, and adapter.kind is lora" in begins('{"peft_type": "LOKR"}', {})
    assert "adapter_config.json: Expecting value" in begins("nothing", {})
    assert "adapter.start_from: has no effect with adapter.kind: none" in begins(dora, {"kind": "none"})
