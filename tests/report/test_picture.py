"""The picture of a run."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

from isotype.report.picture import picture
from isotype.report.record import read_run

from .runs import run_folder, step

Image = pytest.importorskip("PIL.Image")


def drawn(folder: Path):
    return Image.open(BytesIO(picture(read_run(folder)))).convert("RGB")


def test_it_is_wide_enough_to_read_and_holds_curves_and_text(whole_run: Path) -> None:
    image = drawn(whole_run)
    assert image.width == 1440
    assert 1200 < image.height < 3000
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert {(0x25, 0x63, 0xC4), (0xB8, 0x50, 0x0F), (0xF5, 0xF5, 0xF2), (0xFF, 0xFF, 0xFF)} <= colours, "both curves, page and cards"


def test_runs_that_died_have_one_too(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    nothing = drawn(run_folder(tmp_path / "a", resolved="model:\n  name: x\n"))
    rows = [step(n, loss=float("nan") if n > 3 else 2.0) for n in range(1, 6)]
    failed = drawn(
        run_folder(
            tmp_path / "b",
            metrics=rows,
            result={"status": "failed", "error": "$x^2 is not finite\n\x00 $"},
            samples=[{"step": 0, "samples": [{"prompt": "为什么 $\\frac{", "answer": "因为"}, {"prompt": "p"}]}],
        )
    )
    assert nothing.height < 300 < failed.height
    assert not recwarn.list


def test_pictures_of_a_diffusion_run_are_a_grid_over_time(tmp_path: Path) -> None:
    colours = {(0, 10): (255, 0, 0), (0, 20): (0, 255, 0), (1, 10): (0, 0, 255), (1, 20): (255, 255, 0)}
    moments = []
    for step_ in (10, 20):
        files = []
        for i in (0, 1):
            file = tmp_path / f"a/samples/step_{step_}_{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), colours[i, step_]).save(file)
            files.append({"prompt": f"prompt {i}", "answer": "a picture", "file": f"samples/step_{step_}_{i}.png"})
        moments.append({"step": step_, "samples": files})
    image = drawn(run_folder(tmp_path / "a", resolved="model:\n  name: x\n", samples=moments))
    places = {}
    for key, colour in colours.items():
        seen = [(x, y) for x in range(0, image.width, 4) for y in range(0, image.height, 4) if image.getpixel((x, y)) == colour]
        assert len(seen) > 100, f"{key}: the picture is large enough to see"
        places[key] = seen[0]
    assert places[0, 10][1] == places[0, 20][1] < places[1, 10][1] == places[1, 20][1], "a row a prompt"
    assert places[0, 10][0] == places[1, 10][0] < places[0, 20][0] == places[1, 20][0], "a column a step"
