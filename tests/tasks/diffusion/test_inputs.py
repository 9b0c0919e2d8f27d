"""What a diffusion run cannot begin with is one line each, before anything heavy is loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from isotype.config.load import load
from isotype.tasks.diffusion.pixels import BadPicture, Size, Window, pixels
from tests.tasks.diffusion.refused import refused


def test_keys_of_language_runs_are_refused(drawn, tmp_path):
    loaded = drawn(run={"sample_tokens": 4})
    assert "run.sample_tokens: does not apply to a diffusion run" in refused(loaded)
    assert "here it is run.sample_steps" in refused(loaded)


def test_keys_of_diffusion_runs_are_refused(configured):
    assert "precision.vae: does not apply to a language run" in refused(configured(precision={"preset": "fp32", "vae": "fp32"}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"images": {"resolution": 36}}, "images.resolution: 36 is not a multiple of 8"),
        ({"images": {"resolution": 128}}, "more than this model has positions for"),
        ({"images": {"train": "nowhere"}}, "images.train: nowhere: no such file or folder"),
        ({"precision": {"preset": "bf16-lora", "timesteps": "bf16"}}, "PR025"),
    ],
)
def test_settings_that_cannot_be_kept(drawn, sections, said):
    assert said in refused(drawn(**sections))


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("sd3", {"objective": "epsilon"}, "diffusion.objective: epsilon, but scheduler_config.json declares flow_matching"),
        ("sdxl", {"objective": "v"}, "diffusion.objective: v, but scheduler_config.json declares epsilon"),
        ("sd3", {"weighting": "min_snr"}, "diffusion.weighting: min_snr is not defined for flow matching"),
        ("sdxl", {"shift": 3.0}, "diffusion.shift: 3.0 has no effect with epsilon"),
        ("sdxl", {"max_text_length": 8}, "diffusion.max_text_length: 8 has no effect"),
    ],
)
def test_settings_that_an_objective_does_not_have(drawn, studio, kind, settings, said):
    assert said in refused(drawn(model=getattr(studio, kind), diffusion=settings))


def square(side: int) -> Window:
    return Window(Size(side, side))


def saved(image, tmp_path, suffix=".png", **settings) -> bytes:
    file = tmp_path / f"picture{suffix}"
    image.save(file, **settings)
    return file.read_bytes()


def test_pictures_come_out_as_a_viewer_shows_them(tmp_path):
    plain = pixels(saved(Image.new("RGB", (16, 16), (255, 0, 0)), tmp_path), square(16))
    assert plain[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    clear = pixels(saved(Image.new("RGBA", (16, 16), (255, 0, 0, 0)), tmp_path), square(16))
    assert clear.min() == 1.0
    deep = pixels(saved(Image.fromarray(np.full((16, 16), 32768, dtype=np.uint16)), tmp_path), square(16))
    assert abs(float(deep.mean())) < 0.01
    halves = Image.new("RGB", (32, 16), "white")
    halves.paste((0, 0, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: the left half is shown on top
    turned = pixels(saved(halves, tmp_path, ".png", exif=exif), square(16))
    assert turned[:, 0].mean() < -0.9 < 0.9 < turned[:, -1].mean()
    cmyk = pixels(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path, ".jpg"), square(16))
    assert cmyk[0].mean() > 0.8 > -0.8 > cmyk[1].mean()
    with pytest.raises(BadPicture, match="an empty file"):
        pixels(b"", square(16))


def test_a_folder_of_language_takes_no_pictures(configured, studio, tmp_path):
    file = tmp_path / "mixed.yaml"
    base = configured().config.model.name
    file.write_text(json.dumps({"model": {"name": base}, "images": {"train": str(studio.pictures)}}))
    said = refused(load(file, [], {}))
    assert said == f"{file}:1 model.name: {base}: no model_index.json there: images.train needs a diffusers pipeline"
