"""Reads the frames of video files. Pillow reads GIF files, and PyAV reads the other formats.

A clip has a fixed frame rate. The file may have another rate. The time of the clip is divided into
intervals of equal length, one for each frame of the clip, and the frame that the file shows in the
middle of an interval is used.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ...config.kind import VIDEO_SUFFIXES as PYAV_SUFFIXES
from ...data.pictures import MAX_PIXELS, BadPicture, bad_picture_reason
from ...environment.install import install_command
from ...errors import UsageError

VIDEO_SUFFIXES = (*PYAV_SUFFIXES, ".gif")


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES


def missing_pyav(videos: Iterable[Path]) -> bool:
    """Returns True if some of the videos can be read only with PyAV, and PyAV is missing."""
    return find_spec("av") is None and any(path.suffix.lower() in PYAV_SUFFIXES for path in videos)


def refuse_without_pyav(videos: Iterable[Path]) -> None:
    """Raises UsageError if some of the videos can be read only with PyAV, and PyAV is missing."""
    videos = list(videos)
    if not missing_pyav(videos):
        return
    suffixes = Counter(path.suffix.lower() for path in videos)
    needs_pyav = {suffix: count for suffix, count in suffixes.items() if suffix in PYAV_SUFFIXES}
    files = ", ".join(f"{count} {suffix}" for suffix, count in sorted(needs_pyav.items()))
    raise UsageError(
        f"images.frames: video files ({files}) are read with PyAV, which is not installed",
        fix=f"{install_command('video')}; or extract the frames: ffmpeg -i a.mp4 a/%05d.png",
    )


@cache
def count_frames(path: Path, frame_rate: float) -> int:
    """Returns the number of frames that a clip of the complete file would have. For most formats
    the duration is read from the file's header. Raises BadPicture, OSError.
    """
    if path.suffix.lower() == ".gif":
        return _frames_until(_gif_duration(path), frame_rate)
    import av

    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container)
            if stream.duration is not None and stream.time_base is not None:
                return _frames_until(float(stream.duration * stream.time_base), frame_rate)
            if container.duration is not None:
                return _frames_until(container.duration / av.time_base, frame_rate)
    except av.FFmpegError as error:
        raise BadPicture(_video_reason(error)) from None
    return sum(1 for _ in select_frames(_decode_video(path), frame_rate))


def read_frames(path: Path, frame_rate: float, count: int) -> Iterator[Any]:
    """Yields the first `count` frames of a clip as PIL images in RGB. Raises BadPicture if the file
    has fewer frames, and OSError if it cannot be read.
    """
    timed_frames = _decode_gif(path) if path.suffix.lower() == ".gif" else _decode_video(path)
    frame_count = 0
    for frame in select_frames(timed_frames, frame_rate):
        yield frame
        frame_count += 1
        if frame_count == count:
            return
    raise BadPicture(
        f"the file ends after {frame_count} frames at {frame_rate:g} frames per second, and"
        f" {count} are needed"
    )


Frame = TypeVar("Frame")
# Some formats round times to milliseconds. If the file has twice the rate of the clip, the middle of
# each interval is the time at which a frame begins, and this frame must be used for every interval
_TIME_ROUNDING = 0.002  # seconds


class TimedFrame(NamedTuple, Generic[Frame]):
    """A frame of a file.

    time      the time at which the frame begins, in seconds
    duration  how long the frame is shown, in seconds; None if the file does not say it. It is used
              for the last frame only, because every other frame is shown until the next one
    """

    time: float
    duration: float | None
    image: Frame


def select_frames(timed_frames: Iterable[TimedFrame[Frame]], frame_rate: float) -> Iterator[Frame]:
    """Yields the frames of a clip with this frame rate. The frames of the file may have different
    durations.
    """
    selected_count = 0
    start = None
    interval = 0.0
    previous: TimedFrame[Frame] | None = None
    for frame in timed_frames:
        start = frame.time if start is None else start
        if previous is not None:
            interval = frame.time - previous.time
            while selected_count < _frames_until(frame.time - start, frame_rate):
                yield previous.image
                selected_count += 1
        previous = frame
    if previous is None or start is None:
        return
    duration = interval if previous.duration is None else previous.duration
    while selected_count < _frames_until(previous.time + duration - start, frame_rate):
        yield previous.image
        selected_count += 1


def _frames_until(seconds: float, frame_rate: float) -> int:
    """Returns the number of frames whose intervals have their middle before this time."""
    return max(0, math.ceil((seconds - _TIME_ROUNDING) * frame_rate - 0.5))


def _decode_video(path: Path) -> Iterator[TimedFrame[Any]]:
    import av

    try:
        with av.open(str(path)) as container:
            stream = _video_stream(container)
            if stream.width * stream.height > MAX_PIXELS:
                raise BadPicture(f"frames of {stream.width} x {stream.height} pixels are too large")
            stream.thread_type = "AUTO"
            for frame in container.decode(stream):
                image = frame.to_image()
                # a phone stores an upright video lying on its side
                if frame.rotation:
                    image = image.rotate(frame.rotation, expand=True)
                duration = float(frame.duration * frame.time_base) if frame.duration else None
                yield TimedFrame(frame.time, duration, image)
    except av.FFmpegError as error:
        raise BadPicture(_video_reason(error)) from None


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise BadPicture("the file contains no video")
    return container.streams.video[0]


def _video_reason(error: Any) -> str:
    return f"not a whole video: {error.strerror or error}"


def _decode_gif(path: Path) -> Iterator[TimedFrame[Any]]:
    for time, duration, image in _gif_frames(path):
        yield TimedFrame(time, duration, image.convert("RGB"))


def _gif_duration(path: Path) -> float:
    return sum(duration for _, duration, _ in _gif_frames(path))


def _gif_frames(path: Path) -> Iterator[tuple[float, float, Any]]:
    """Yields the frames of a GIF file, each with its time and its duration in seconds."""
    from PIL import Image, ImageSequence

    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content)) as image:
            time = 0.0
            for frame in ImageSequence.Iterator(image):
                duration = _shown_seconds(frame)
                yield time, duration, frame
                time += duration
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(bad_picture_reason(error, content)) from None


def _shown_seconds(frame: Any) -> float:
    """Returns how long a frame of a GIF file is shown. Viewers show frames without a time for 100
    ms.
    """
    return (frame.info.get("duration") or 100) / 1000
