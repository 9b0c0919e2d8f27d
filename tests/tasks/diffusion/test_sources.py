"""Where a denoiser comes from: a folder, the hub, or a configuration; and an adapter that a run goes on with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from isotype.environment import hub as hub_of_isotype
from isotype.errors import UsageError
from isotype.inference.diffusion import draw_with
from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.encode import Store
from isotype.tasks.diffusion.pipeline import PipelineFolder
from isotype.training.setup import settle
from tests.hub import hub
from tests.tasks.diffusion.models import draw, refused
from tests.tasks.diffusion.test_inputs import SMALLER

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


def test_what_is_not_on_the_hub_is_one_line(drawn, cache):
    assert "model.name: someone/sd3: not in the local cache, and HF_HUB_OFFLINE is set" in refused(drawn(model="someone/sd3"))


def test_a_denoiser_from_a_configuration_trains_resumes_and_draws(drawn, studio, tmp_path):
    model = {"init": "random", "config": SMALLER, "name": str(studio.flux)}
    settings = {"steps": 2, "eval_every": 2}
    loaded = drawn("whole", model=model, adapter={"kind": "none"}, train=settings)
    assert train(loaded) == 0
    saved = json.loads((tmp_path / "whole/model/config.json").read_text())
    assert (saved["num_attention_heads"], saved["num_single_layers"]) == (1, 2)
    assert draw_with(tmp_path / "whole", ["a red circle"])[0] == "model"


def test_an_adapter_of_another_model_is_refused_before_anything_is_encoded(drawn, studio, tmp_path):
    assert train(drawn("sd3", train={"steps": 1, "eval_every": 1})) == 0
    start = str(tmp_path / "sd3/adapter")
    said = refused(drawn("flux", model=studio.flux, adapter={"start_from": start}))
    assert said.startswith(f"adapter.start_from: {start}: an adapter of another model than this FluxTransformer2DModel")


# --- What goes wrong around the data and the folders is one line, and nothing that was made is lost.


def copied(folder: Path, to: Path, without: str) -> Path:
    return shutil.copytree(folder, to, ignore=shutil.ignore_patterns(without))


@pytest.mark.parametrize("part", ["vae", "scheduler", "text_encoder_2"])
def test_a_pipeline_without_a_part_is_named(studio, tmp_path, part):
    folder = copied(studio.flux, tmp_path / "flux", part)
    with pytest.raises(UsageError, match=f"model.name: .*flux: the pipeline has no {part}\n"):
        PipelineFolder.open(str(folder))


def test_ctrl_c_while_caching_keeps_what_was_made(drawn, tmp_path, monkeypatch, capsys):
    images = {"cache": str(tmp_path / "cache")}
    put, count = Store.put, [0]

    def stops(self, key, tensors):
        count[0] += 1
        if count[0] > 6:
            raise KeyboardInterrupt
        put(self, key, tensors)

    monkeypatch.setattr(Store, "put", stops)
    assert train(drawn(images=images)) == 130
    assert "nothing was begun, and the same command starts again" in capsys.readouterr().out
    monkeypatch.undo()
    assert found_again(drawn(images=images)) == 6


def found_again(loaded) -> int:
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    task.encode(torch.device("cpu"))
    return task.encoder.found


def test_cut_pictures_may_be_left_out_and_are_listed(drawn, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(20):
        draw("square", "green", i % 3).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a green square")
    (folder / "7.png").write_bytes((folder / "7.png").read_bytes()[:60])
    images = {"train": str(folder), "eval_split": 0.0, "on_bad_row": "skip"}
    assert train(drawn(images=images, train={"steps": 1, "eval_every": 1})) == 0
    (row,) = (json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines())
    assert row["place"].endswith("7.png")
    assert json.loads((tmp_path / "run/data.json").read_text())["train_pictures"] == 19
    (folder / "8.png").write_bytes(b"GIF?")
    with pytest.raises(UsageError, match="at most 5% of the pictures"):
        train(drawn("again", images=images))
