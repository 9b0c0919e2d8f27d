"""The pictures that a diffusion run drew, as the report shows them: read from the run's own folder only, as data in the page."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"samples/step_\d+_\d+\.png")  # what a run writes; a folder from elsewhere may name anything
_LARGEST = 8 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"


def picture_of(folder: Path, sample: dict[str, Any]) -> bytes | None:
    """The PNG of one sample; None for words, and where the file is missing or no picture of a run."""
    name = sample.get("file")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return content if content.startswith(_PNG) else None


def as_data(content: bytes | None) -> str:
    """For an `img` of the page; empty where there is no picture."""
    return "data:image/png;base64," + base64.b64encode(content).decode() if content else ""
