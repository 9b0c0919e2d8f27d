"""Video files as clips: which frames are taken at a frame rate, GIF through Pillow, other formats
through PyAV, and files that cannot be used.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from isotype.config.schema import ImagesSection
from isotype.errors import UsageError
from isotype.tasks.choose import train
from tests.api import BadPicture, TimedFrame, collect_pictures, displayed_size, video_files
from tests.tasks.diffusion.models import encoded

SIDE = 32


def grey(k: int) -> Image.Image:
    """A picture whose level tells its number."""
    return Image.new("RGB", (SIDE, SIDE), (8 * k + 4,) * 3)


def number(image) -> int:
    return round((float(np.asarray(image).mean()) - 4) / 8)


def write_gif(path: Path, frames: int, milliseconds: int | list[int]) -> Path:
    first, *others = map(grey, range(frames))
    first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0)
    path.with_suffix(".txt").write_text("a red circle")
    return path


def write_video(
    path: Path,
    frames: int,
    rate: int,
    *,
    times: list[float] | None = None,
    images: list[Image.Image] | None = None,
    turned: int = 0,
) -> Path:
    """Writes a video of `images`, by default of grey levels that tell their numbers."""
    av = pytest.importorskip("av")
    images = images or [grey(k) for k in range(frames)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix == ".mp4" else "libvpx", rate=rate)
        stream.width, stream.height = images[0].size
        stream.pix_fmt = "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for k, image in enumerate(images):
            frame = av.VideoFrame.from_image(image)
            if times is not None:
                frame.pts = round(1000 * times[k])
                frame.time_base = Fraction(1, 1000)
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    path.with_suffix(".txt").write_text("a red circle")
    return path


def collect(folder: Path, frames: int, rate: float = 16.0):
    settings = ImagesSection(train=str(folder), eval_split=0.0, frames=frames)
    return collect_pictures(settings, seed=0, frame_rate=rate)


@pytest.mark.parametrize(
    ("file_rate", "rate", "expected"),
    [
        (16, 16, [0, 1, 2, 3, 4, 5, 6, 7]),
        (32, 16, [1, 3, 5, 7]),
        (30, 16, [1, 2, 4, 6]),
        (8, 16, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]),
        (24, 25, [0, 1, 2, 3, 4, 5, 6, 7]),
        (60, 30, [1, 3, 5, 7]),
    ],
)
def test_the_frame_in_the_middle_of_each_interval_is_used(file_rate, rate, expected):
    # Matroska rounds times to milliseconds
    timed = [TimedFrame(round(5 + k / file_rate, 3), None, k) for k in range(8)]
    assert list(video_files.select_frames(timed, rate)) == expected


# each frame of a file whose frame rate varies, with the tenths of a second for which it is shown
DURATIONS = [1, 1, 4, 1, 1, 7, 2]
SHOWN = [k for k, tenths in enumerate(DURATIONS) for _ in range(tenths)]


def test_a_gif_of_frames_of_different_durations(tmp_path):
    file = write_gif(tmp_path / "a.gif", 7, [100 * tenths for tenths in DURATIONS])
    assert video_files.count_frames(file, 10.0) == len(SHOWN)
    images = video_files.read_frames(file, 10.0, len(SHOWN))
    assert [number(image) for image in images] == SHOWN
    with pytest.raises(BadPicture, match="ends after 17 frames"):
        list(video_files.read_frames(file, 10.0, len(SHOWN) + 1))


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_a_variable_frame_rate_is_read_as_a_player_shows_it(tmp_path, suffix):
    times = [sum(DURATIONS[:k]) / 10 for k in range(len(DURATIONS))]
    # both encoders store the duration of the last frame as 1 / rate, so the rate is 1 / 0.2 s
    file = write_video(tmp_path / f"a{suffix}", 7, 5, times=times)
    assert video_files.count_frames(file, 10.0) == len(SHOWN)
    images = video_files.read_frames(file, 10.0, len(SHOWN))
    assert [number(image) for image in images] == SHOWN
    with pytest.raises(BadPicture, match="ends after 17 frames"):
        list(video_files.read_frames(file, 10.0, len(SHOWN) + 1))


@pytest.mark.parametrize(("turned", "side"), [(90, "left"), (-90, "right"), (180, "bottom")])
def test_a_video_that_lies_on_its_side_is_turned(tmp_path, turned, side):
    """A phone stores an upright video lying, with a display matrix that turns it
    counter-clockwise. The stored frames have a white stripe at the top.
    """
    width, height = 64, 32
    stored = Image.new("RGB", (width, height))
    stored.paste((255, 255, 255), (0, 0, width, 8))
    file = write_video(tmp_path / "a.mp4", 4, 16, images=[stored] * 4, turned=turned)
    (image,) = video_files.read_frames(file, 16.0, 1)
    levels = np.asarray(image.convert("L")).astype(float)
    assert image.size == ((width, height) if turned == 180 else (height, width))
    stripes = {"left": levels[:, :4], "right": levels[:, -4:], "bottom": levels[-4:]}
    assert stripes[side].mean() > 200
    assert levels.mean() < 100
    (picture,) = collect(tmp_path, 3).train
    assert displayed_size(picture.content.read()) == image.size


def test_a_gif_is_a_clip_without_pyav(tmp_path):
    file = write_gif(tmp_path / "a.gif", 8, 50)
    assert video_files.count_frames(file, 10.0) == 4
    images = video_files.read_frames(file, 10.0, 4)
    assert [number(image) for image in images] == [1, 3, 5, 7]
    pictures = collect(tmp_path, 3, 10.0)
    assert pictures.other_files == {}
    assert pictures.cut_clip_lines() == [
        "clips that are longer than images.frames: 1 of 1; their first 3 frames are used"
    ]
    with pytest.raises(UsageError, match="4 frames at 10 per second, and 5 are needed"):
        collect(tmp_path, 5, 10.0)


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_frames_of_a_video_file(tmp_path, suffix):
    file = write_video(tmp_path / f"a{suffix}", 16, 32)
    assert video_files.count_frames(file, 16.0) == 8
    images = video_files.read_frames(file, 16.0, 8)
    assert [number(image) for image in images] == [1, 3, 5, 7, 9, 11, 13, 15]
    (picture,) = collect(tmp_path, 5).train
    assert number(next(picture.content.open_frames())) == 1
    assert (
        picture.content.fingerprint() != collect(tmp_path, 5, 32.0).train[0].content.fingerprint()
    )


def test_broken_files_are_named(tmp_path):
    pytest.importorskip("av")
    write_gif(tmp_path / "cut.gif", 8, 50)
    (tmp_path / "cut.gif").write_bytes((tmp_path / "cut.gif").read_bytes()[:60])
    for name, content in (("empty.mp4", b""), ("text.mp4", b"no video at all" * 99)):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).with_suffix(".txt").write_text("a red circle")
    with pytest.raises(UsageError) as refused:
        collect(tmp_path, 5)
    for name in ("cut.gif", "empty.mp4", "text.mp4"):
        assert str(tmp_path / name) in refused.value.message


def test_without_pyav_the_message_names_the_files_and_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "find_spec", lambda name: None)
    for name in ("a.mp4", "b.mp4", "c.webm"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError) as refused:
        collect(tmp_path, 5)
    assert "video files (2 .mp4, 1 .webm) are read with PyAV" in refused.value.message
    assert "[video]" in refused.value.fix


def test_files_and_folders_give_the_same_latents(studio, drawn, tmp_path):
    """A GIF of two colours loses nothing, so its frames are those of a folder."""
    images = [Image.new("L", (SIDE, SIDE), 255 * (k % 2)).convert("RGB") for k in range(3)]
    (tmp_path / "folder/a").mkdir(parents=True)
    (tmp_path / "file").mkdir()
    for k, image in enumerate(images):
        image.save(tmp_path / f"folder/a/{k}.png")
    images[0].save(
        tmp_path / "file/a.gif", save_all=True, append_images=images[1:], duration=100, loop=0
    )
    means = []
    for name in ("folder", "file"):
        (tmp_path / name / "a.txt").write_text("a red circle")
        settings = {"train": str(tmp_path / name), "frames": 3, "frame_rate": 10, "eval_split": 0.0}
        task = encoded(drawn(name, model=studio.wan, images=settings))
        (row,) = task.data.encoded_rows
        means.append(task.data.encoder.store.get(row.latents[0])["mean"])
    assert means[0].equal(means[1])


@pytest.mark.full
def test_a_run_trains_on_a_video_file(studio, drawn, tmp_path):
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips/a.mp4", 16, 32)
    images = {"train": str(tmp_path / "clips"), "frames": 5, "eval_split": 0.0}
    assert train(drawn(model=studio.ltx, images=images, train={"steps": 2})) == 0


def test_a_file_that_ends_early_is_named_when_it_is_read(tmp_path):
    file = write_gif(tmp_path / "a.gif", 8, 50)
    with pytest.raises(BadPicture, match="ends after 4 frames at 10 frames per second, and 5"):
        list(video_files.read_frames(file, 10.0, 5))
