"""A diffusion run from folder to verified adapter, on the one loop."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from isotype.tasks.choose import train


@pytest.mark.parametrize(("family", "preset"), [("sd3", "fp32"), ("sd3", "bf16-lora"), ("flux", "fp32"), ("flux", "bf16-lora")])
def test_a_lora_trains_from_a_folder(drawn, studio, tmp_path, family, preset):
    run = {"samples": ["a red circle on white"]} if preset == "bf16-lora" else {}
    loaded = drawn(model=getattr(studio, family), precision={"preset": preset}, run=run)
    assert train(loaded) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "done"
    assert result["pictures"] == 8
    assert abs(result["check"]["trained_loss"] - result["check"]["reloaded_loss"]) < 1e-6
    precision = json.loads((tmp_path / "run/precision.json").read_text())
    assert precision["violations"] == []
    text = "bf16" if preset == "bf16-lora" else "fp32"
    for role, dtype in {"vae": "fp32", "text_encoder": text, "timesteps": "fp32", "latents": "fp32"}.items():
        assert precision["declared"][role]["value"] == dtype
        assert set(precision["observed"][role]) == {dtype}
    lora = tmp_path / "run/adapter/pytorch_lora_weights.safetensors"
    with safe_open(lora, framework="pt") as file:
        assert json.loads(file.metadata()["lora_adapter_metadata"])["transformer.lora_alpha"] == 32.0
    assert any(bool(tensor.any()) for name, tensor in load_file(lora).items() if "lora_B" in name)
    if run:
        said = json.loads((tmp_path / "run/samples/step_4.json").read_text())["samples"]
        assert (tmp_path / "run" / said[0]["file"]).read_bytes().startswith(b"\x89PNG")
