"""Aspect buckets and the windows that are kept of a picture."""

from __future__ import annotations

import pytest
from PIL import Image

from isotype.tasks.diffusion.batches import PictureStream, Row
from isotype.tasks.diffusion.pixels import BadPicture, Size, Window, buckets, mask_pixels, pixels, shown_size
from tests.tasks.diffusion.models import draw
from tests.tasks.diffusion.test_inputs import saved


def test_buckets_have_about_the_squares_area():
    assert buckets(1024, max_aspect=1.0, multiple=16) == [Size(1024, 1024)]
    found = buckets(1024, max_aspect=2.0, multiple=16)
    assert found[0] == Size(1024, 1024)
    assert Size(832, 1216) in found
    assert {Size(size.width, size.height) for size in found} == set(found)
    for size in found:
        assert size.height % 64 == size.width % 64 == 0
        assert 0.9 * 1024**2 < size.area <= 1024**2
        assert max(size.height, size.width) <= 2 * min(size.height, size.width)


def test_a_window_is_cut_where_it_says(tmp_path):
    wide = draw("circle", "red").resize((64, 32)).crop((0, 0, 64, 32))
    wide.paste((0, 0, 0), (0, 0, 32, 32))
    content = saved(wide, tmp_path)
    assert shown_size(content) == (64, 32)
    size = Size(16, 16)
    assert float(pixels(content, Window(size, left=0.0)).max()) < -0.8
    assert float(pixels(content, Window(size, left=1.0))[:, 0, 0].min()) > 0.8
    assert pixels(content, Window(Size(16, 32))).shape == (3, 16, 32)
    assert float(mask_pixels(content, Window(size, left=1.0))[0, 0, 0]) > 0.8
    with pytest.raises(BadPicture, match="black all over"):
        mask_pixels(saved(Image.new("RGB", (8, 8)), tmp_path), Window(size))


def rows(*sizes: int) -> list[Row]:
    return [Row((str(i),), (), ("",), Size(8, side)) for i, side in enumerate(sizes)]


def test_a_steps_rows_have_one_size_and_every_row_comes_once_an_epoch():
    data = rows(*[8] * 9, *[16] * 7)
    stream = PictureStream(data, seed=0, shuffle=True, together=4)
    steps = [[placed.row for placed in stream.take(4)] for _ in range(4)]
    assert [len({row.size for row in step}) for step in steps] == [1, 1, 1, 2]
    assert sorted(row.latents for step in steps for row in step) == sorted(row.latents for row in data)
    by_two = PictureStream(data, seed=0, shuffle=True, together=4)
    assert [placed.row for _ in range(8) for placed in by_two.take(2)] == [row for step in steps for row in step]
