"""The pictures that a diffusion run drew, as the report shows them: read from the run's own folder only, as data in the page."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from .record import RunRecord

_NAME = re.compile(r"samples/step_\d+_\d+\.png")  # what a run writes; a folder from elsewhere may name anything
_LARGEST = 8 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"


def picture_of(folder: Path, sample: dict[str, Any]) -> bytes | None:
    """The PNG of one sample; None for text, and where the file is missing or no picture of a run."""
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


def asked(sample: dict[str, Any]) -> str:
    """The prompt, and whose picture it is where a round has two of it."""
    prompt = str(sample.get("prompt", ""))
    return f"{prompt} (average of the weights)" if sample.get("weights") == "average" else prompt


def pictures_over_time(record: RunRecord, *, rows: int, columns: int) -> tuple[list[int], dict[str, dict[int, bytes]]]:
    """At most `columns` steps, evenly spread, the first and the last among them; and the pictures of the first prompts by step."""
    by_prompt: dict[str, dict[int, bytes]] = {}
    for moment in record.samples:
        for sample in moment["samples"]:
            content = picture_of(record.folder, sample) if isinstance(sample, dict) else None
            if content is not None:
                by_prompt.setdefault(asked(sample), {})[moment["step"]] = content
    shown = dict(list(by_prompt.items())[:rows])
    return spread(sorted({step for drawn in shown.values() for step in drawn}), columns), shown


def spread(steps: list[int], most: int) -> list[int]:
    """At most so many, evenly spread."""
    if len(steps) <= most:
        return steps
    return [steps[round(k * (len(steps) - 1) / (most - 1))] for k in range(most)]


def as_data(content: bytes | None) -> str:
    """For an `img` of the page; empty where there is no picture."""
    return "data:image/png;base64," + base64.b64encode(content).decode() if content else ""
