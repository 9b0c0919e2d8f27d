"""`isotype init` on a folder of clips or pictures proposes settings with which a run starts; `isotype import`
of a data set of clips gives such settings too.
"""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.config.load import load
from isotype.tasks.choose import plan_run
from isotype.translate import translate
from tests.api import clip_proposal, init_yaml, propose_picture_settings
from tests.tasks.diffusion.test_clips import write_clip
from tests.tasks.diffusion.test_video_files import write_gif, write_video

WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


def test_the_proposed_settings_make_a_plan(studio, tmp_path):
    write_clip(tmp_path / "clips/b", 9)
    write_gif(tmp_path / "clips/a.gif", 20, 50)
    file = tmp_path / "run.yaml"
    arguments = ["init", str(file), "--model", str(studio.wan), "--data", str(tmp_path / "clips")]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0
    assert "the shortest of 2 clips has 9 frames at 16 per second" in result.output
    config = load(file).config
    assert (config.images.frames, config.images.resolution) == (9, 32)
    loaded = load(file, [], {"precision.preset": "fp32", "model.device": "cpu"})
    assert plan_run(loaded).to_dict()["data"]["train_clips_by_frames"] == {"9": 2}


def test_init_on_pictures_proposes_steps_and_a_resolution(studio, tmp_path):
    """The defaults of the schema would use each of these pictures once."""
    for k in range(3):
        Image.new("RGB", (640, 480) if k else (40, 30)).save(tmp_path / f"{k}.png")
        (tmp_path / f"{k}.txt").write_text(f"picture {k}")
    file = tmp_path / "run.yaml"
    arguments = ["init", str(file), "--model", "noob.safetensors", "--data", str(tmp_path)]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0
    assert "images.resolution: 512: most pictures have fewer pixels than 1024" in result.output
    assert "1 of 3 pictures have fewer pixels and are enlarged" in result.output
    config = load(file).config
    assert (config.images.resolution, config.images.max_aspect) == (512, 2.0)
    assert (config.train.steps, config.train.batch_size) == (2000, 1)
    assert (config.run.samples, config.run.adapters_every) == (["picture 0"], 500)
    proposal = propose_picture_settings("sd-v1-5", str(tmp_path), is_lora=False)
    assert set(proposal.settings) == {"images.resolution", "images.max_aspect", "run.samples"}
    (tmp_path / "old").mkdir()
    Image.new("RGB", (2000, 2000)).save(tmp_path / "old/big.png")
    sides = {"runwayml/stable-diffusion-v1-5": 512, "org/flux": 1024, str(studio.sd1): 64}
    for model, side in sides.items():
        settings = propose_picture_settings(model, f"{tmp_path}/old", is_lora=True).settings
        assert settings["images.resolution"] == side
    save_file({"cond_stage_model.transformer.a": torch.zeros(1)}, tmp_path / "sd.safetensors")
    settings = propose_picture_settings(
        f"{tmp_path}/sd.safetensors", f"{tmp_path}/old", is_lora=True
    ).settings
    assert settings["images.resolution"] == 512
    assert propose_picture_settings("org/flux", str(tmp_path / "no"), is_lora=True) is None


def propose(model: str, folder: Path):
    return clip_proposal.propose_clip_settings(model, str(folder))


def test_the_number_of_frames_fits_the_clips_and_the_model(tmp_path):
    write_clip(tmp_path / "a", 40)
    write_clip(tmp_path / "b", 16)
    assert propose(WAN, tmp_path).settings["images.frames"] == 13
    assert propose("Lightricks/LTX-Video", tmp_path).settings["images.frames"] == 9
    write_clip(tmp_path / "b2", 3)
    for k in range(20):
        write_clip(tmp_path / f"c{k}", 40)
    proposal = propose(WAN, tmp_path)
    assert proposal.settings["images.frames"] == 13, "one of 23 clips may be left out"
    assert "more frames" not in proposal.reasons[0]
    assert propose(WAN, tmp_path / "c0") is None, "pictures, not clips"


def test_long_clips_are_cut_and_a_second_denoiser_is_named(tmp_path):
    write_clip(tmp_path / "a", 60)
    proposal = propose("Wan-AI/Wan2.2-T2V-A14B-Diffusers", tmp_path)
    assert proposal.settings["images.frames"] == clip_proposal.MAX_FRAMES
    assert proposal.settings["diffusion.expert"] == "low_noise"
    assert "more frames need more memory" in proposal.reasons[0]
    assert "diffusion.expert=high_noise" in proposal.reasons[1]


def test_pictures_in_subfolders_and_other_models_get_no_proposal(tmp_path):
    write_clip(tmp_path / "a", 5, None)
    (tmp_path / "a/frame_8.txt").write_text("a caption of a picture")
    assert propose(WAN, tmp_path) is None
    write_clip(tmp_path / "b", 5)
    assert propose("black-forest-labs/FLUX.1-dev", tmp_path) is None
    assert propose(WAN, tmp_path / "nowhere") is None
    assert propose(WAN, tmp_path).settings["images.frames"] == 5


def test_a_folder_of_videos_starts_a_diffusion_run(tmp_path):
    assert "\ndata:" in init_yaml(model=WAN, data=str(tmp_path))
    (tmp_path / "a.mp4").write_bytes(b"")
    text = init_yaml(model=WAN, data=str(tmp_path))
    assert "\nimages:" in text
    assert "\ndata:" not in text


def test_videos_are_measured_with_pyav_and_not_without_it(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", 64, 32)
    assert propose(WAN, tmp_path).settings["images.frames"] == 29
    monkeypatch.setattr(clip_proposal, "missing_pyav", lambda videos: True)
    proposal = propose(WAN, tmp_path)
    assert proposal.settings["images.frames"] == clip_proposal.UNMEASURED_FRAMES
    assert "were not measured" in proposal.reasons[0]


def test_the_table_of_models_is_that_of_the_families():
    from isotype.tasks.diffusion.families import FAMILIES

    for name, model in clip_proposal.VIDEO_MODELS.items():
        family = FAMILIES[name]
        assert family.frame_rate == model.frame_rate
        vae = {"spatio_temporal_scaling": (True, True, True, False), "patch_size_t": 1}
        assert family.latents.frame_step(vae) == model.frame_step
        vae[model.frame_step_key] = 2
        assert family.latents.frame_step(vae) == 2


@pytest.mark.parametrize("tool", ["musubi", "diffusion-pipe"])
def test_imported_data_sets_of_clips_and_pictures_make_a_plan(studio, tmp_path, tool):
    write_clip(tmp_path / "clips/a", 5)
    if tool == "musubi":
        text = (
            "[general]\nresolution = [32, 32]\n"
            f'[[datasets]]\nvideo_directory = "{tmp_path}/clips"\ntarget_frames = [5]\n'
            f'[[datasets]]\nimage_directory = "{studio.pictures}"\n'
        )
    else:
        text = (
            "resolutions = [32]\nframe_buckets = [1, 5]\n"
            f'[[directory]]\npath = "{tmp_path}/clips"\n'
            f'[[directory]]\npath = "{studio.pictures}"\n'
        )
        write_gif(tmp_path / "clips/b.gif", 20, 50)
    (tmp_path / "data.toml").write_text(text)
    (tmp_path / "run.yaml").write_text(translate(tmp_path / "data.toml").text)
    overrides = {"model.name": str(studio.wan), "precision.preset": "fp32"}
    loaded = load(tmp_path / "run.yaml", [], overrides)
    clips = plan_run(loaded).to_dict()["data"]["train_clips_by_frames"]
    pictures = len(list(studio.pictures.glob("*.png")))
    assert clips == {"5": 1 if tool == "musubi" else 2, "1": pictures}
