"""Training on clips: what is read, the loss beside diffusers' own denoiser in fp64, a run that
learns one clip, is read by diffusers and resumes, and videos as samples.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2Pipeline, LTXPipeline
from PIL import Image
from safetensors.torch import load_file

from isotype.config.load import load
from isotype.config.schema import ImagesSection
from isotype.errors import UsageError
from isotype.report import write_report
from isotype.tasks.choose import plan_run, train
from tests.api import PipelineFolder, collect_pictures, read_picture
from tests.tasks.diffusion.every_family import read_back
from tests.tasks.diffusion.models import draw, encoded
from tests.training.interrupted import cut_back

FRAMES = 5


def write_clip(folder: Path, frames: int, caption: str | None = "a red circle", first: int = 8):
    """A circle that moves; the names of the frames are not padded with zeros."""
    folder.mkdir(parents=True)
    for k in range(frames):
        draw("circle", "red", k).save(folder / f"frame_{first + k}.png")
    if caption is not None:
        (folder.parent / f"{folder.name}.txt").write_text(caption)


@pytest.fixture
def clips(tmp_path) -> Path:
    write_clip(tmp_path / "clips/a.v1", FRAMES)
    write_clip(tmp_path / "clips/more/b", FRAMES + 4, "a circle that moves")
    return tmp_path / "clips"


def collect(folder: Path, frames: int = FRAMES, **images):
    settings = ImagesSection(train=str(folder), eval_split=0.0, frames=frames, **images)
    return collect_pictures(settings, seed=0, frame_rate=16.0)


def test_a_subfolder_is_a_clip_and_its_frames_are_sorted_by_number(clips):
    pictures = collect(clips)
    first, second = pictures.train
    assert [frame.name for frame in first.content.frames] == [
        f"frame_{8 + k}.png" for k in range(5)
    ]
    assert first.captions == ("a red circle",)
    assert second.captions == ("a circle that moves",)
    assert first.content.read() == (clips / "a.v1/frame_8.png").read_bytes()
    assert pictures.cut_clip_lines() == [
        "clips that are longer than images.frames: 1 of 2; their first 5 frames are used"
    ]
    names = collect(clips, captions="names").train
    assert [picture.captions for picture in names] == [("a.v1",), ("b",)]


def test_the_frames_that_are_not_used_do_not_change_the_fingerprint(clips):
    def fingerprints():
        return [picture.content.fingerprint() for picture in collect(clips).train]

    before = fingerprints()
    draw("square", "green", 0).save(clips / "more/b/frame_15.png")
    assert fingerprints() == before
    draw("square", "green", 0).save(clips / "more/b/frame_9.png")
    assert fingerprints()[0] == before[0]
    assert fingerprints()[1] != before[1]


def test_clips_that_cannot_be_used_are_named(clips):
    write_clip(clips / "short", FRAMES - 1)
    write_clip(clips / "silent", FRAMES, None)
    draw("circle", "red", 0).save(clips / "alone.png")
    (clips / "a.v1/frame_8.txt").write_text("a caption of a frame")
    with pytest.raises(UsageError) as refused:
        collect(clips)
    lines = str(refused.value).splitlines()
    assert f"{clips}/short: 4 frames, and 5 are needed (images.frames)" in lines
    assert any(line.startswith(f"{clips}/silent: no caption: there is no .txt") for line in lines)
    assert any(line.startswith(f"{clips}: 1 picture outside of a clip") for line in lines)
    assert f"{clips}/a.v1/frame_8.txt: a caption without a picture" in lines


def test_rows_of_a_table_name_clips(clips):
    rows = [{"video": "a.v1", "text": "one"}, {"video": "more/b", "text": "two"}]
    table = clips / "rows.jsonl"
    table.write_text("\n".join(json.dumps(row) for row in rows))
    assert [picture.captions for picture in collect(table).train] == [("one",), ("two",)]
    table.write_text(json.dumps({"video": "nowhere", "text": "none"}))
    with pytest.raises(UsageError, match="video: nowhere: no such video file or folder"):
        collect(table)


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("wan", {"images": {"frames": 4}}, "images.frames: 4: the VAE combines 2 frames"),
        ("wan", {"run": {"sample_frames": 2}}, "run.sample_frames: 2: the VAE combines 2 frames"),
        ("wan", {"images": {"frame_rate": 8}}, "images.frame_rate: has no effect on pictures"),
        ("wan", {"images": {"frames": 5, "masks": "m"}}, "images.masks: the loss of a clip"),
        ("flux", {"images": {"frames": 5}}, "images.frames: has no effect: FluxPipeline"),
        (
            "flux",
            {"images": {"train": [{"name": "a", "frames": 5}]}},
            r"images.train\[0\].frames: has no effect: FluxPipeline",
        ),
        (
            "wan",
            {"images": {"train": [{"name": "a", "frames": 4}]}},
            r"images.train\[0\].frames: 4: the VAE combines 2 frames",
        ),
        (
            "wan",
            {
                "images": {
                    "frames": 5,
                    "regularisation": [{"name": "a", "caption": "a dog", "draw": 2}],
                }
            },
            r"images.regularisation\[0\].draw: the model draws pictures, and frames is 5",
        ),
        ("flux", {"images": {"frame_rate": 8}}, "images.frame_rate: has no effect: FluxPipeline"),
        pytest.param(
            "ltx2",
            {"adapter": {"kind": "none"}, "precision": {"preset": "bf16-mixed"}},
            "adapter.kind: none: the loss of LTX2Pipeline does not depend on the layers for sound",
            marks=pytest.mark.full,
        ),
    ],
)
def test_settings_that_fit_no_clip_are_refused(studio, drawn, model, sections, message):
    with pytest.raises(UsageError, match=message):
        plan_run(drawn(model=getattr(studio, model), **sections))


def plain_wan(model, batch, noisy):
    return model(noisy, batch.sigma * 1000, batch.text["text"], return_dict=False)[0]


def plain_ltx(model, batch, noisy):
    frames, height, width = noisy.shape[2:]
    packed = LTXPipeline._pack_latents(noisy)
    made = model(
        packed, batch.text["text"], batch.sigma * 1000, batch.text["mask"], num_frames=frames, height=height, width=width,
        rope_interpolation_scale=(2 / 12, 4, 4), return_dict=False,
    )[0]  # fmt: skip
    return LTXPipeline._unpack_latents(made, frames, height, width)


def plain_ltx2(model, batch, noisy):
    frames, height, width = noisy.shape[2:]
    text, sound = batch.text, torch.ones(len(noisy), 3, 8).to(noisy)
    made = model(
        LTX2Pipeline._pack_latents(noisy), sound, text["text"], text["audio"], batch.sigma * 1000, sigma=batch.sigma * 1000,
        encoder_attention_mask=text["mask"], audio_encoder_attention_mask=text["mask"], num_frames=frames, height=height, width=width,
        fps=12.0, audio_num_frames=3, isolate_modalities=True, return_dict=False,
    )[0]  # fmt: skip
    return LTX2Pipeline._unpack_latents(made, frames, height, width)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("wan", plain_wan),
        ("ltx", plain_ltx),
        pytest.param("ltx2", plain_ltx2, marks=pytest.mark.full),
    ],
)
def test_the_loss_of_a_clip_is_that_of_diffusers_in_fp64(studio, drawn, clips, name, plain):
    loaded = drawn(
        model=getattr(studio, name),
        images={"train": str(clips), "frames": FRAMES, "frame_rate": 12, "eval_split": 0.0},
    )
    task = encoded(loaded)
    batch = task.collate(task.feed().take(2))
    assert batch.latents.shape == (2, 4, 3, 8, 8)
    wide = {key: tensor.double() for key, tensor in batch.text.items()}
    latents, noise, sigma = (t.double() for t in (batch.latents, batch.noise, batch.sigma))
    batch = type(batch)(latents, noise, sigma, wide, crop=batch.crop)
    model = task.run.folder.denoiser(torch.float32).double()
    level = sigma.view(-1, 1, 1, 1, 1)
    error = plain(model, batch, (1 - level) * latents + level * noise) - (noise - latents)
    losses = task.run.losses(model, batch, dtype="fp32")
    expected = error.square().flatten(1).mean(1)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=0)


def test_a_plan_counts_the_tokens_of_all_frames(studio, drawn, clips):
    images = {"train": str(clips), "frames": FRAMES, "eval_split": 0.0}
    plan = plan_run(drawn(model=studio.wan, images=images))
    facts = plan.to_dict()["data"]
    assert (facts["frames"], facts["latent_tokens"]) == (5, 3 * 16)
    assert plan.memory.not_simulated is None


def test_a_lora_of_clips_is_read_by_diffusers_and_resumes(studio, drawn, clips, tmp_path, capsys):
    loaded = drawn(
        model=studio.wan,
        images={"train": str(clips), "frames": FRAMES, "eval_split": None, "flip": True},
        train={"steps": 4, "batch_size": 1},
        run={"save_every": 2, "samples": ["a red circle"], "sample_every": 4},
    )
    run = tmp_path / "run"
    assert train(loaded) == 0
    adapter = run / "adapter/adapter_model.safetensors"
    assert_named_clips(run, capsys.readouterr().out)
    read_back(run / "adapter", PipelineFolder.open(str(studio.wan)), load_file(adapter))

    (sample,) = json.loads((run / "samples/step_4.json").read_text())["samples"]
    assert sample["answer"].startswith("5 frames of 32 x 32 pixels")
    with Image.open(run / sample["file"]) as video:
        assert (video.format, video.n_frames, video.size) == ("WEBP", FRAMES, (32, 32))
    assert read_picture(run, sample) == (run / sample["file"]).read_bytes()

    first = adapter.read_bytes()
    cut_back(run, 4)
    assert train(load(run / "resolved.yaml", [], {}, resolved=True), resume=run) == 0
    assert adapter.read_bytes() == first


def assert_named_clips(run: Path, output: str) -> None:
    """Checks that output, metrics, report and model card count clips and not pictures."""
    assert " clips/s" in output
    assert "2 training clips of 5 frames" in output
    assert "fewer than 20 clips: none is held out" in output
    assert "pic/s" not in output
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert row["clips"] == 1
    assert row["clips_per_second"] > 0
    page = write_report(run).read_text()
    assert "clips per second" in page
    assert "training clips" in page
    assert "pictures per second" not in page
    card = (run / "adapter/README.md").read_text()
    assert "text-to-video" in card
    assert "| clips a step | 1 |" in card


def mixed_images(clips: Path, pictures: Path) -> dict[str, Any]:
    sources = [{"name": str(clips), "frames": FRAMES, "repeats": 2}, {"name": str(pictures)}]
    return {"train": sources, "eval_split": 0.0}


def test_a_step_of_a_mixed_run_has_clips_or_pictures(studio, drawn, clips):
    pictures = studio.pictures
    loaded = drawn(
        model=studio.wan,
        images=mixed_images(clips, pictures),
        train={"batch_size": 2},
    )
    task = encoded(loaded)
    feed = task.feed()
    shapes = Counter[int]()
    for _ in range(task.rows // 2):
        batch = task.collate(feed.take(2))
        shapes[batch.latents.ndim] += 1
    assert shapes == {5: 2, 4: (task.rows - 4) // 2}
    (longest,) = {placed.row.latent_frames for placed in task.largest_rows(1)}
    assert longest == 3
    facts = plan_run(loaded).to_dict()["data"]
    picture_count = len(list(pictures.glob("*.png")))
    assert facts["train_clips_by_frames"] == {"5": 4, "1": picture_count}
    assert (facts["frames"], facts["latent_tokens"]) == (5, 3 * 16)
    (line, *_) = task.plan_lines()
    assert f"4 training clips of 5 frames and {picture_count} training pictures, 0 for" in line
    assert "at most 48 latent tokens each" in line


def test_large_pictures_beside_small_clips_are_the_largest_rows(studio, drawn, clips):
    images = mixed_images(clips, studio.pictures)
    images["train"][1]["resolution"] = 128
    plan = plan_run(drawn(model=studio.wan, images=images)).to_dict()
    assert plan["data"]["latent_tokens"] == 16 * 16, "more than the 3 * 4 * 4 of a clip"


@pytest.mark.full
def test_a_run_on_pictures_and_clips_resumes(studio, drawn, clips, tmp_path):
    loaded = drawn(
        model=studio.wan,
        images={**mixed_images(clips, studio.pictures), "limit": 6},
        train={"steps": 4, "batch_size": 1},
        run={"save_every": 2},
    )
    run = tmp_path / "run"
    assert train(loaded) == 0
    sizes = json.loads((run / "data.json").read_text())["train_pictures_by_size"]
    assert sizes == {"32 x 32, 1 frame": 4, "32 x 32, 5 frames": 4}
    adapter = run / "adapter/adapter_model.safetensors"
    first = adapter.read_bytes()
    cut_back(run, 4)
    assert train(load(run / "resolved.yaml", [], {}, resolved=True), resume=run) == 0
    assert adapter.read_bytes() == first


def test_the_same_clips_in_two_lengths(clips):
    source = {"name": str(clips / "more"), "repeats": 1}
    images = ImagesSection(train=[{**source, "frames": 5}, {**source, "frames": 9}], eval_split=0.0)
    contents = [picture.content for picture in collect_pictures(images, seed=0).train]
    assert [content.frame_count for content in contents] == [5, 9]
    with pytest.raises(UsageError, match="is named twice"):
        collect_pictures(ImagesSection(train=[{**source, "frames": 5}] * 2), seed=0)


@pytest.mark.full
def test_the_loss_of_a_clip_falls(studio, drawn, clips, tmp_path):
    loaded = drawn(
        model=studio.wan,
        images={"train": str(clips), "frames": FRAMES, "eval": str(clips)},
        adapter={"kind": "none"},
        train={"steps": 40, "batch_size": 2, "learning_rate": 1e-2, "eval_every": 39},
    )
    assert train(loaded) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert losses[-1] < 0.7 * losses[0], losses
