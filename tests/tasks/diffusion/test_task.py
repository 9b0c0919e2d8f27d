"""A diffusion run from folder to verified adapter, on the one loop."""

import json
import os
import shutil
import signal
import types
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.tasks.choose import train
from tests.api import Callback
from tests.tasks.diffusion.models import built, encoded
from tests.training.interrupted import cut_back


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("flux", "bf16"),
        *(pytest.param("sdxl", base, marks=pytest.mark.full) for base in ("nf4", "fp8")),
    ],
)
def test_a_lora_trains_from_a_folder(drawn, studio, tmp_path, family, base):
    run = {"samples": ["a red circle on white"], "sample_every": 4} if base == "bf16" else {}
    loaded = drawn(
        model=getattr(studio, family), precision={"preset": "bf16-lora", "base": base}, run=run
    )
    assert train(loaded) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "done"
    assert result["pictures"] == 8
    assert abs(result["check"]["trained_loss"] - result["check"]["reloaded_loss"]) < 1e-6
    precision = json.loads((tmp_path / "run/precision.json").read_text())
    assert precision["violations"] == []
    assert set(precision["observed"]["base"]) == {base, "bf16"}
    for role, dtype in {
        "vae": "fp32",
        "text_encoder": "bf16",
        "timesteps": "fp32",
        "latents": "fp32",
    }.items():
        assert precision["declared"][role]["value"] == dtype
        assert set(precision["observed"][role]) == {dtype}
    card = ModelCard.load(tmp_path / "run/adapter/README.md")
    assert card.data.base_model is None, "the base is a folder, and the hub refuses a path"
    assert f"* base: `{family}`" in card.text
    lora = tmp_path / "run/adapter/pytorch_lora_weights.safetensors"
    with safe_open(lora, framework="pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings["unet.lora_alpha" if family == "sdxl" else "transformer.lora_alpha"] == 32.0
    assert any(bool(tensor.any()) for name, tensor in load_file(lora).items() if "lora_B" in name)
    if run:
        said = json.loads((tmp_path / "run/samples/step_4.json").read_text())["samples"]
        assert (tmp_path / "run" / said[0]["file"]).read_bytes().startswith(b"\x89PNG")


def adapter(run):
    return load_file(run / "adapter/adapter_model.safetensors")


def shaped(studio, folder):
    """Pictures of three shapes, with two captions and a mask each, and two for regularisation."""
    for i, file in enumerate(sorted(studio.pictures.glob("*.png"))):
        wide = Image.open(file).resize([(32, 32), (48, 24), (24, 48)][i % 3])
        for name in ("mine", "masks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            wide.save(folder / name / file.name)
        (folder / "mine" / file.with_suffix(".txt").name).write_text(
            file.with_suffix(".txt").read_text() + "a picture\n"
        )
    return {
        "train": [{"name": str(folder / "mine"), "repeats": 2}], "masks": str(folder / "masks"), "max_aspect": 2.0, "crop": 3,
        "regularisation": [{"name": str(studio.pictures), "weight": 0.5}], "caption_dropout": 0.5, "flip": True,
    }  # fmt: skip


@pytest.mark.full
def test_rows_are_drawn_by_position_whatever_the_batch(drawn, studio, tmp_path):
    """1 x 8 and 4 x 2 train the same adapter, with all that is drawn for a row: noise, time,
    caption, window, mirror image.
    """
    images, settings = shaped(studio, tmp_path / "pictures"), {"steps": 3, "eval_every": 3}
    assert train(drawn("whole", images=images, train={**settings, "batch_size": 8})) == 0
    assert (
        train(drawn("parts", images=images, train={**settings, "batch_size": 2, "accumulate": 4}))
        == 0
    )
    whole, parts = adapter(tmp_path / "whole"), adapter(tmp_path / "parts")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-4, atol=1e-6)
    data = json.loads((tmp_path / "whole/data.json").read_text())
    assert (data["regularisation_pictures"], data["masked_pictures"], data["train_pictures"]) == (
        12,
        10,
        32,
    )
    assert data["buckets"] > 1
    assert sum(data["train_pictures_by_size"].values()) == 32


def test_a_loss_counts_where_the_mask_is_and_times_its_weight(drawn, studio, tmp_path):
    loaded = drawn(images=shaped(studio, tmp_path / "pictures"))
    task, model = built(loaded, studio.sd3)
    (batch,) = {len(b.latents): b for b in [task.collate(task.largest_rows(2))]}.values()
    plain = replace(batch, mask=None, weights=None)
    shown = torch.zeros_like(batch.latents[:, :1])
    shown[..., :2] = 1
    with torch.no_grad():
        whole = task.run.losses(model, plain, dtype="fp32")
        halves = [
            task.run.losses(model, replace(plain, mask=mask), dtype="fp32")
            for mask in (shown, 1 - shown)
        ]
        weighted = task.run.losses(
            model, replace(plain, weights=torch.tensor([1.0, 0.25])), dtype="fp32"
        )
    share = float(shown.mean())
    torch.testing.assert_close(whole, share * halves[0] + (1 - share) * halves[1])
    torch.testing.assert_close(weighted, whole * torch.tensor([1.0, 0.25]))
    assert not torch.equal(halves[0], halves[1])


def test_an_interrupted_run_resumes_bit_for_bit_and_samples_change_nothing(drawn, tmp_path):
    train_section = {"steps": 4, "eval_every": 2}
    images = {"caption_dropout": 0.5, "flip": True, "cache": str(tmp_path / "cache")}
    assert train(drawn("plain", images=images, train=train_section)) == 0

    class CtrlC(Callback):
        def on_step(self, moment):
            if moment.step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    drawing = {"samples": ["a red circle on white"], "sample_every": 2}
    loaded = drawn("stopped", images=images, train=train_section, run=drawing)
    assert train(loaded, callbacks=[CtrlC()]) == 130
    assert json.loads((tmp_path / "stopped/result.json").read_text())["steps"] == 1, (
        "saved where no checkpoint was due"
    )
    again = load(tmp_path / "stopped/resolved.yaml", [], {}, resolved=True)
    assert train(again, resume=tmp_path / "stopped") == 0
    first, second = adapter(tmp_path / "plain"), adapter(tmp_path / "stopped")
    assert all(torch.equal(first[name], second[name]) for name in first)
    made = json.loads((tmp_path / "stopped/data.json").read_text())
    assert made["made"] == 0, "latents and embeddings come from the cache the second time"


@pytest.mark.full
def test_an_average_is_saved_beside_the_result_and_resumes(drawn, tmp_path):
    train_section = {"steps": 4, "ema": 0.5, "eval_every": 4}
    sampled = {"samples": ["a red circle on white"], "sample_every": 4, "save_every": 2}
    assert train(drawn("whole", train=train_section, run=sampled)) == 0
    first, last = (
        json.loads((tmp_path / f"whole/samples/step_{step}.json").read_text())["samples"]
        for step in (0, 4)
    )
    assert [one.get("weights") for one in last] == [None, "average"]
    pictures = [
        [(tmp_path / "whole" / one["file"]).read_bytes() for one in moment]
        for moment in (first, last)
    ]
    assert pictures[0][0] == pictures[0][1], "before the first step the average is what is trained"
    assert len({pictures[0][0], *pictures[1]}) == 3
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert result["adapter_ema"]["averaged_loss"] == pytest.approx(
        result["adapter_ema"]["reloaded_loss"], abs=1e-6
    )
    precision = json.loads((tmp_path / "whole/precision.json").read_text())
    assert set(precision["observed"]["ema"]) == {"fp32"}
    trained, averaged = (
        load_file(tmp_path / f"whole/{name}/adapter_model.safetensors")
        for name in ("adapter", "adapter_ema")
    )
    assert any(not torch.equal(trained[name], averaged[name]) for name in trained)

    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    cut_back(tmp_path / "stopped", 4)
    again = load(tmp_path / "stopped/resolved.yaml", [], {}, resolved=True)
    assert train(again, resume=tmp_path / "stopped") == 0
    resumed = load_file(tmp_path / "stopped/adapter_ema/adapter_model.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in averaged.items())


@pytest.mark.parametrize(("gpu_bytes", "expected"), [(1 << 40, "cuda"), (1 << 10, "cpu")])
def test_text_encoders_that_do_not_fit_into_the_gpu_run_on_the_cpu(
    drawn, studio, monkeypatch, gpu_bytes, expected
):
    encoder = encoded(drawn(model=studio.flux)).data.encoder
    keys = encoder.encode_captions([encoder.text_input("a red circle", ())])
    encoder.device = torch.device("cuda")
    del encoder.text_device
    properties = types.SimpleNamespace(total_memory=gpu_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert encoder.text_device.type == expected
    if expected == "cpu":
        assert encoder.encode_captions([encoder.text_input("a red circle", ())]) == keys
        encoder.encode_captions([encoder.text_input("a green circle", ())])
