"""Where a denoiser comes from: a folder, the hub, or a configuration; and an adapter that a run goes on with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from isotype.environment import hub as hub_of_isotype
from isotype.errors import UsageError
from isotype.inference.diffusion import draw_with
from isotype.tasks.choose import plan, task_of, train
from isotype.tasks.diffusion.pipeline import PipelineFolder
from isotype.training.setup import settle
from tests.hub import hub
from tests.tasks.diffusion.refused import refused

SMALLER = {
    "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2,
    "attention_head_dim": 16, "num_attention_heads": 1, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(studio, tmp_path, monkeypatch):
    """The local cache of the hub, with a pipeline in it, and no network."""
    repository = tmp_path / "hub/models--someone--flux"
    shutil.copytree(studio.flux, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots" / COMMIT


def test_a_pipeline_of_the_hub_trains_as_its_folder_does(drawn, studio, cache, tmp_path):
    for run, model in (("folder", studio.flux), ("hub", "someone/flux")):
        assert train(drawn(run, model=model, train={"steps": 2, "eval_every": 2})) == 0
    ours, theirs = (load_file(tmp_path / run / "adapter/adapter_model.safetensors") for run in ("hub", "folder"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert draw_with(tmp_path / "hub", ["a red circle"])[0] == "adapter"


def test_of_the_hub_settings_come_first_and_weights_by_part(studio, tmp_path, monkeypatch):
    there = tmp_path / "served/models/someone/flux"
    shutil.copytree(studio.flux, there)
    (there / "flux1.safetensors").write_bytes(b"the same weights in another form")
    (there / "transformer/diffusion_pytorch_model.fp16.safetensors").write_bytes(b"in another dtype")
    (tmp_path / "served/models/someone/llama").mkdir()
    (tmp_path / "served/models/someone/llama/config.json").write_text("{}")
    with hub(tmp_path / "served") as served:
        for name, value in (
            ("ENDPOINT", served.url), ("HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", False),
        ):  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hub_of_isotype, "_away", {})

        def fetched() -> set[str]:
            paths = [line.partition("/resolve/")[2].partition("/")[2] for line in served.asked if line.startswith("GET ")]
            return {path for path in paths if path.endswith(".safetensors")}

        folder = PipelineFolder.open("someone/flux")
        assert sum(p.numel() for p in folder.denoiser_outline().parameters()) > 50_000
        assert fetched() == set(), served.asked
        folder.vae(torch.float32)
        assert fetched() == {"vae/diffusion_pytorch_model.safetensors"}, served.asked
        made = folder.denoiser(torch.float32)
        assert fetched() == {f"{part}/diffusion_pytorch_model.safetensors" for part in ("vae", "transformer")}, served.asked
        theirs = PipelineFolder.open(str(studio.flux)).denoiser(torch.float32)
        assert torch.equal(made.x_embedder.weight, theirs.x_embedder.weight)
        with pytest.raises(UsageError, match=r"model.name: someone/llama: no model_index.json on the hub"):
            PipelineFolder.open("someone/llama")
        with pytest.raises(UsageError, match="someone/nowhere: neither a folder here nor a model on the hub"):
            PipelineFolder.open("someone/nowhere")


def test_what_is_not_on_the_hub_is_one_line(drawn, cache, tmp_path):
    assert "model.name: someone/sd3: not in the local cache, and HF_HUB_OFFLINE is set" in refused(drawn(model="someone/sd3"))
    file = tmp_path / "flux.safetensors"
    file.write_bytes(b"")
    assert f"model.name: {file}: a file; a diffusion model is a folder" in refused(drawn(model=file))


def test_a_denoiser_from_a_configuration_trains_resumes_and_draws(drawn, studio, tmp_path):
    model = {"init": "random", "config": SMALLER, "name": str(studio.flux)}
    settings = {"steps": 2, "eval_every": 2}
    loaded = drawn("whole", model=model, adapter={"kind": "none"}, train=settings)
    assert train(loaded) == 0
    saved = json.loads((tmp_path / "whole/model/config.json").read_text())
    assert (saved["num_attention_heads"], saved["num_single_layers"]) == (1, 2)
    assert draw_with(tmp_path / "whole", ["a red circle"])[0] == "model"
    first = load_file(tmp_path / "whole/base/diffusion_pytorch_model.safetensors")
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    task.take_base(tmp_path / "again")
    again = load_file(tmp_path / "again/diffusion_pytorch_model.safetensors")
    assert all(torch.equal(again[name], first[name]) for name in first), "the same seed draws the same weights"
    other = loaded.config.model_copy(update={"train": loaded.config.train.model_copy(update={"seed": 1})})
    task = task_of(other)
    settle(task, loaded.sources)
    task.take_base(tmp_path / "other")
    another = load_file(tmp_path / "other/diffusion_pytorch_model.safetensors")
    assert any(not torch.equal(another[name], first[name]) for name in first)
    task.take_base(tmp_path / "again")
    assert torch.equal(task.folder.denoiser(torch.float32).x_embedder.weight, again["x_embedder.weight"]), "what is there is kept"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"init": "pretrained", "config": SMALLER}, "model.config: has no effect without model.init: random"),
        ({"config": SMALLER | {"_class_name": "SD3Transformer2DModel"}}, "but the transformer of"),
        ({"config": SMALLER | {"num_layer": 2}}, "model.config.num_layer: unknown key, did you mean num_layers?"),
        ({"config": SMALLER | {"num_layers": "many"}}, "model.config: FluxTransformer2DModel: "),
        ({"config": SMALLER, "name": None}, "model.name: missing: the pipeline whose VAE"),
        ({"config": "nowhere.json"}, "model.config: nowhere.json: "),
    ],
)
def test_configurations_that_cannot_be_trained(drawn, studio, model, said):
    line = refused(drawn(model={"name": str(studio.flux), "init": "random"} | model))
    assert said in line
    assert len(line.splitlines()) == 1


def test_a_run_goes_on_with_an_adapter(drawn, studio, tmp_path):
    settings = {"learning_rate": 1e-3, "eval_every": 2}
    assert train(drawn("first", adapter={"r": 2, "targets": ["to_q"]}, train={"steps": 2} | settings)) == 0
    second = drawn("second", adapter={"start_from": str(tmp_path / "first/adapter")}, train={"steps": 2} | settings)
    assert plan(second).trainable > 0
    assert train(second) == 0
    first, last = (json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("first", "second"))
    result = json.loads((tmp_path / "first/result.json").read_text())
    assert last["eval_loss"] == pytest.approx(result["check"]["trained_loss"], abs=1e-6)
    assert last["eval_loss"] != first["eval_loss"]
    names = load_file(tmp_path / "second/adapter/adapter_model.safetensors")
    assert all(tensor.shape[0 if "lora_A" in name else 1] == 2 for name, tensor in names.items())


def test_an_adapter_of_another_model_is_refused_before_anything_is_encoded(drawn, studio, tmp_path):
    assert train(drawn("sd3", train={"steps": 1, "eval_every": 1})) == 0
    start = str(tmp_path / "sd3/adapter")
    said = refused(drawn("flux", model=studio.flux, adapter={"start_from": start}))
    assert said.startswith(f"adapter.start_from: {start}: an adapter of another model than this FluxTransformer2DModel")
    assert "nowhere/adapter_model.safetensors: no such file" in refused(drawn("flux", adapter={"start_from": "nowhere"}))
