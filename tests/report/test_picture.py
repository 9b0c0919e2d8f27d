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


@pytest.mark.parametrize("letter", ["W", "i", "界"])
def test_long_words_end_where_their_card_does(tmp_path: Path, letter: str) -> None:
    long = letter * 400
    told = {"prompt": long, "answer": long, "reference": long}
    folder = run_folder(
        tmp_path / (letter * 60), metrics=[step(1)], resolved=f"model:\n  name: {long}\n", samples=[{"step": 0, "samples": [told]}]
    )
    image = drawn(folder)
    beside = image.crop((image.width - 52, 0, image.width, image.height))  # the margin, less a rounded corner
    assert beside.getcolors() == [(52 * image.height, (0xF5, 0xF5, 0xF2))]
