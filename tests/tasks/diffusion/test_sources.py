"""Where a denoiser comes from: a folder, the hub, or a configuration; and an adapter that a run
goes on with.
"""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants

from isotype.errors import UsageError
from isotype.tasks.choose import choose_task, plan_run, train
from isotype.tasks.diffusion.loss import resolve_shift
from tests.api import PipelineFolder, draw_pictures, prepare_data
from tests.api import hub as hub_of_isotype
from tests.hub import hub
from tests.tasks.diffusion.models import built, draw, refused
from tests.tasks.diffusion.test_typed import SMALLER


def test_of_the_hub_settings_come_first_and_weights_by_part(studio, tmp_path, monkeypatch):
    there = tmp_path / "served/models/someone/flux"
    shutil.copytree(studio.flux, there)
    (there / "flux1.safetensors").write_bytes(b"the same weights in another form")
    (there / "transformer/diffusion_pytorch_model.fp16.safetensors").write_bytes(
        b"in another dtype"
    )
    (tmp_path / "served/models/someone/llama").mkdir()
    (tmp_path / "served/models/someone/llama/config.json").write_text("{}")
    with hub(tmp_path / "served") as served:
        for name, value in (
            ("ENDPOINT", served.url), ("HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"),
            ("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", False),
        ):  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(hub_of_isotype, "_unreachable_by_endpoint", {})

        def fetched() -> set[str]:
            paths = [
                line.partition("/resolve/")[2].partition("/")[2]
                for line in served.asked
                if line.startswith("GET ")
            ]
            return {path for path in paths if path.endswith(".safetensors")}

        folder = PipelineFolder.open("someone/flux")
        assert sum(p.numel() for p in folder.denoiser_outline().parameters()) > 50_000
        assert fetched() == set(), served.asked
        with_other_vae = PipelineFolder.open("someone/flux", vae=str(studio.flux))
        assert with_other_vae.files("vae")
        with_other_vae.vae(torch.float32)
        assert fetched() == set(), "a VAE that `model.vae` replaces is not downloaded"
        folder.vae(torch.float32)
        assert fetched() == {"vae/diffusion_pytorch_model.safetensors"}, served.asked
        made = folder.denoiser(torch.float32)
        assert fetched() == {
            f"{part}/diffusion_pytorch_model.safetensors" for part in ("vae", "transformer")
        }, served.asked
        theirs = PipelineFolder.open(str(studio.flux)).denoiser(torch.float32)
        assert torch.equal(made.x_embedder.weight, theirs.x_embedder.weight)
        with pytest.raises(
            UsageError, match=r"model.name: someone/llama: no model_index.json on the hub"
        ):
            PipelineFolder.open("someone/llama")
        with pytest.raises(
            UsageError, match="someone/nowhere: neither a folder here nor a model on the hub"
        ):
            PipelineFolder.open("someone/nowhere")


def test_a_denoiser_from_a_configuration_trains_resumes_and_draws(drawn, studio, tmp_path):
    model = {"init": "random", "config": SMALLER, "name": str(studio.flux)}
    settings = {"steps": 2, "eval_every": 2}
    loaded = drawn("whole", model=model, adapter={"kind": "none"}, train=settings)
    assert train(loaded) == 0
    saved = json.loads((tmp_path / "whole/model/config.json").read_text())
    assert (saved["num_attention_heads"], saved["num_single_layers"]) == (1, 2)
    assert draw_pictures(tmp_path / "whole", ["a red circle"])[0] == "model"


# --- What goes wrong around the data and the folders is one line, and nothing that was made is
# lost.


def test_a_pipeline_without_a_part_is_named(studio, tmp_path):
    for part in ("vae", "scheduler", "text_encoder_2"):
        shutil.copytree(studio.flux, tmp_path / part / "flux", ignore=shutil.ignore_patterns(part))
        with pytest.raises(UsageError, match=f"model.name: .*flux: the pipeline has no {part}\n"):
            PipelineFolder.open(str(tmp_path / part / "flux"))


def test_cut_pictures_may_be_left_out_and_are_listed(drawn, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(20):
        draw("square", "green", i % 3).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text("a green square")
    (folder / "7.png").write_bytes((folder / "7.png").read_bytes()[:60])
    images = {"train": str(folder), "eval_split": 0.0, "on_bad_row": "skip"}
    assert train(drawn(images=images, train={"steps": 1, "eval_every": 1})) == 0
    (row,) = (
        json.loads(line) for line in (tmp_path / "run/bad_rows.jsonl").read_text().splitlines()
    )
    assert row["place"].endswith("7.png")
    assert json.loads((tmp_path / "run/data.json").read_text())["train_pictures"] == 19
    (folder / "8.png").write_bytes(b"GIF?")
    with pytest.raises(UsageError, match="at most 5% of the pictures"):
        train(drawn("again", images=images))


# --- Class pictures, which the base model draws before training.


CLASS = "a circle on white"


def prior(folder, **settings):
    return {
        "regularisation": [
            {"name": str(folder), "caption": CLASS, "draw": 15, "weight": 0.5, **settings}
        ],
        "flip": True,
    }


@pytest.mark.full
def test_class_pictures_are_drawn_once_by_the_base_and_mixed_one_to_one(drawn, studio, tmp_path):
    folder, images = tmp_path / "class", prior(tmp_path / "class")
    assert (
        "15 class pictures are drawn by the base model" in plan_run(drawn(images=images)).to_text()
    )
    assert not folder.exists(), "a plan draws nothing"
    settings = {"run": {"samples": [{"prompt": CLASS, "seed": 1}], "sample_every": 4}}
    assert train(drawn("first", images=images, **settings)) == 0
    files = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    assert len(files) == len(set(files.values())) == 15
    assert json.loads((folder / "drawn.json").read_text())["caption"] == CLASS
    before_step_1 = (tmp_path / "first/samples/step_0_0.png").read_bytes()
    assert before_step_1 == files["drawn_0001.png"], (
        "an adapter that has learnt nothing yet is the base"
    )

    (folder / "drawn_0003.png").unlink()
    loaded = drawn("second", images=images, **settings)
    task = choose_task(loaded.config)
    prepare_data(task, loaded.sources)
    assert len(task.data.pictures.missing_class_pictures) == 1
    task.encode(torch.device("cpu"))
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == files, (
        "the missing one, as it was"
    )
    weights = [row.weight for row in task.data.train_rows]
    assert (weights.count(1.0), weights.count(0.5)) == (15, 15)
    own = {
        row.latents: task.data.train_rows.count(row)
        for row in task.data.train_rows
        if row.weight == 1.0
    }
    assert len(own) == 10
    assert set(own.values()) == {1, 2}

    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    # as a second process does, which missed a picture before the first one drew it
    task.encode(torch.device("cpu"))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.png")} == stamps
    message = "drawn with caption 'a circle on white', not 'a square'"
    assert message in refused(drawn(images=prior(folder, caption="a square"))), (
        "also where no picture is missing"
    )
    other_steps = drawn(images=images, run={"sample_steps": 3})
    prepare_data(choose_task(other_steps.config), other_steps.sources)


# --- Several resolutions in one run.


def test_a_picture_comes_in_each_resolution_with_its_own_shift(drawn, studio, tmp_path):
    images = {
        "train": [{"name": str(studio.pictures), "resolution": [32, 64]}],
        "eval_split": 0.25,
        "max_aspect": 2.0,
    }
    loaded = drawn(model=studio.flux, images=images)
    assert "32 x 32 and 64 x 64 pixels, at most 64 latent tokens" in plan_run(loaded).to_text()
    task, _ = built(loaded, studio.flux)
    sizes = [row.size for row in task.data.train_rows]
    assert [sizes.count(size) for size in dict.fromkeys(sizes)] == [9, 9]
    assert len(task.data.evaluation_rows) == 6, "held out at both"
    section, scheduler = loaded.config.diffusion, task.run.folder.config("scheduler")
    by_size = {side: resolve_shift(section, scheduler, tokens=(side // 2) ** 2) for side in (8, 16)}
    assert by_size[8] < by_size[16]
    for tokens, side in ((16, 8), (64, 16)):
        drawn_levels = [
            task.run.objective.draw(torch.Generator().manual_seed(n), tokens) for n in range(50)
        ]
        plain = [
            torch.sigmoid(
                torch.randn((), generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            )
            for n in range(50)
        ]
        expected = [float(by_size[side] * t / (1 + (by_size[side] - 1) * t)) for t in plain]
        assert drawn_levels == pytest.approx(expected, abs=1e-12)
