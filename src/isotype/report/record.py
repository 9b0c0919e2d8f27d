"""Reads a run folder. Every file may be missing, may be incomplete because the run was killed, or
may contain NaN. The pictures of a diffusion run are read only from inside the run folder.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from ..config.yaml_text import read_sections
from ..errors import UsageError
from ..runs.folder import is_locked, open_inside, read_inside, require_run
from ..runs.mapped_files import MAPPED_RECORD, find_truncated_files
from ..runs.metrics import MetricsRows, read_all_rows, read_last_rows
from ..runs.value_limits import MAX_BYTES, check_limits, parse_json
from ..wording import first_line

# files of a run that the report reads
FILES = (
    "resolved.yaml",
    "metrics.jsonl",
    "precision.json",
    "data.json",
    "env.json",
    "result.json",
    "preflight.json",
    "config.yaml",
)

# the attributes of a record that are read from NAME.json
JSON_FILES = (
    "precision",
    "data",
    "result",
    "preflight",
    "plan",
    "manifest",
    "resumes",
    "verify",
)


@dataclass
class RunRecord:
    """Contains everything that the report reads from a run's files. `damaged` lists the files that
    could not be read, with the reasons.
    """

    folder: Path
    metrics_rows: MetricsRows = field(default_factory=MetricsRows)
    precision: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    preflight: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    resumes: dict[str, Any] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    before_edits: dict[str, Any] = field(default_factory=dict)
    is_running: bool = False
    settings_text: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    truncated_files: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.metrics_rows.rows

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Returns the points (step, value) of a metric, in order. Values that are not finite become
        NaN.
        """
        points = []
        for row in self.metrics:
            step = _number(row.get("step"))
            value = row.get(key)
            if step is not None and math.isfinite(step) and (number := _number(value)) is not None:
                points.append((step, number))
        return points

    def last_value(self, key: str) -> float | None:
        """Returns the last finite value of a metric; None if no value is finite."""
        return next((v for _, v in reversed(self.curve(key)) if math.isfinite(v)), None)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Returns the sections of resolved.yaml. They are parsed only when they are used, because
        this takes longer than parsing all other small files.
        """
        try:
            return parse_settings(self.settings_text)
        except ValueError as error:
            self.damaged.append(f"resolved.yaml: {first_line(error)}")
            return {}

    @property
    def best_evaluation(self) -> float | None:
        """Returns the lowest evaluation loss on the current evaluation rows."""
        return min((loss for _, loss in self.evaluations()), default=None)

    def evaluations(self) -> list[tuple[float, float]]:
        """Returns the points (step, loss) of all finite evaluations on the current evaluation rows.
        Evaluations before the last change of the rows are left out.
        """
        changes = [
            change
            for change in list_or_empty(self.resumes.get("changes"))
            if isinstance(change, dict) and change.get("of") == "evaluation rows"
        ]
        changed_after = max(
            (step for change in changes if type(step := change.get("after_step")) is int),
            default=-1,
        )
        return [
            (step, loss)
            for step, loss in self.curve("eval_loss")
            if math.isfinite(loss) and step > changed_after
        ]

    @property
    def status(self) -> str:
        """Returns done, running, failed, interrupted or stopped. A stopped run has no process and
        did not record how it ended.
        """
        recorded = self.result.get("status")
        if recorded is not None:
            return str(recorded)
        if self.is_running:
            return "running"
        return "stopped"

    @property
    def resume_steps(self) -> list[int]:
        """Returns the steps from which the run was resumed, in order."""
        return sorted(
            {
                step
                for step in list_or_empty(self.resumes.get("steps"))
                if type(step) is int and step >= 0
            }
        )

    @property
    def changes(self) -> list[str]:
        """Returns what had changed each time the run was resumed, with the step."""
        return [
            f"after step {change['after_step']}: {change['what']}"
            for change in rows_or_empty(self.resumes.get("changes"), "after_step", "what")
        ]

    def setting(self, section: str, key: str) -> Any:
        return dict_or_empty(self.settings.get(section)).get(key)


def require_run_files(folder: Path) -> None:
    """Raises UsageError if the folder is missing or holds no file of a run. Reads no file."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: "
            + ("not a folder" if folder.exists() else "no such folder")
            + ": give a run's folder"
        )
    if not any((folder / name).is_file() for name in FILES):
        require_run(folder)


def read_run(
    folder: Path, *, read_metrics: Callable[[IO[bytes]], MetricsRows] = read_all_rows
) -> RunRecord:
    """Reads all files of a run. Raises UsageError if the folder is missing or holds no file of a
    run.

    read_metrics  reads metrics.jsonl: all rows, or a selection
    """
    record = _read_files(folder, read_metrics)
    _ = record.settings  # parsed here, so that damage is listed
    return record


def read_run_summary(folder: Path) -> RunRecord:
    """Reads a run as `read_run` does, but skips most of the metrics: it reads only the evaluations
    and the last rows. `resolved.yaml` is not parsed until `settings` is used.
    """
    return _read_files(folder, read_last_rows)


def _read_files(folder: Path, read_metrics: Callable[[IO[bytes]], MetricsRows]) -> RunRecord:
    require_run_files(folder)
    record = RunRecord(folder)
    for name in JSON_FILES:
        setattr(record, name, dict_or_empty(_read_json(folder / f"{name}.json", record)))
    record.environment = dict_or_empty(_read_json(folder / "env.json", record))
    examples = dict_or_empty(_read_json(folder / "examples.json", record))
    record.before_edits = dict_or_empty(examples.get("before"))
    record.examples = [
        row for row in list_or_empty(examples.get("examples")) if isinstance(row, dict)
    ]
    record.is_running = is_locked(folder)
    if record.status == "stopped":
        record.truncated_files = find_truncated_files(_read_json(folder / MAPPED_RECORD, record))
    record.metrics_rows = _read_metrics(folder / "metrics.jsonl", record, read_metrics)
    if broken := record.metrics_rows.broken:
        record.damaged.append(
            f"metrics.jsonl: {len(broken)} lines cut short or broken (first: line {broken[0]})"
        )
    record.settings_text = _read_text(folder / "resolved.yaml", record) or ""
    for path in folder.glob("samples/step_*.json"):
        value = _read_json(path, record)
        if not isinstance(value, dict) or _number(value.get("step")) is None:
            continue
        samples = value.get("samples")
        if not isinstance(samples, list):
            continue
        if len(samples) > MAX_SAMPLES:
            record.damaged.append(f"{path.name}: {len(samples):,} samples; {MAX_SAMPLES} are shown")
        record.samples.append(value | {"samples": samples[:MAX_SAMPLES]})
    record.samples.sort(key=lambda sample: sample["step"])
    return record


def _read_metrics(
    path: Path, record: RunRecord, read_metrics: Callable[[IO[bytes]], MetricsRows]
) -> MetricsRows:
    try:
        with open_inside(record.folder, path, max_bytes=MAX_BYTES) as file:
            return read_metrics(file)
    except FileNotFoundError:
        return MetricsRows()
    except OSError as error:
        record.damaged.append(f"{path.name}: {error.strerror}")
        return MetricsRows()


def parse_settings(text: str) -> dict[str, Any]:
    """Parses resolved.yaml. Returns its sections, each with its keys.

    Raises  ValueError for a text that is not a configuration, and for a value beyond the limits
    """
    settings: dict[str, Any] = {}
    for section, entries in read_sections(text):
        if entries is None:
            settings[section.key] = section.value
        else:
            settings[section.key] = {entry.key: entry.value for entry in entries}
    check_limits(settings)
    return settings


def list_or_empty(value: Any) -> list[Any]:
    """Returns the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def rows_or_empty(value: Any, *keys: str) -> list[dict[str, str]]:
    """Returns those items of a list that are mappings. Each returned dictionary contains only the
    given keys. Its values are texts, and a missing value becomes "".
    """
    return [
        {key: str(row[key]) if row.get(key) is not None else "" for key in keys}
        for row in list_or_empty(value)
        if isinstance(row, dict)
    ]


def _number(value: Any) -> float | None:
    """Returns the value as a float. The result is NaN for a number that JSON cannot represent, and
    None for anything that is not a number.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else math.nan
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return math.nan
    return None


def _read_text(path: Path, record: RunRecord) -> str | None:
    try:
        return read_inside(record.folder, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        record.damaged.append(f"{path.name}: {error.strerror}")
        return None


def _read_json(path: Path, record: RunRecord) -> Any:
    text = _read_text(path, record)
    try:
        return None if text is None else parse_json(text)
    except ValueError as error:
        record.damaged.append(f"{path.name}: {error}")
        return None


# the names that a run writes; an untrusted folder may contain other names
_PICTURE_NAME = re.compile(r"samples/step_\d+_\d+\.(png|webp)")
_MAX_PICTURE_BYTES = 8 << 20  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 32_000_000  # a larger picture needs hundreds of MiB in a browser or Pillow
MAX_SAMPLES = 256  # per step


def read_picture(folder: Path, sample: dict[str, Any]) -> bytes | None:
    """Returns the file of one sample, which is a PNG picture or an animated WebP. The result is None
    for a text sample, and if the file is missing or is not a picture of a run.
    """
    name = sample.get("file")
    if not isinstance(name, str) or not _PICTURE_NAME.fullmatch(name):
        return None
    path = folder / name
    try:
        with open_inside(folder, path) as file:
            content = file.read(_MAX_PICTURE_BYTES + 1)
    except OSError:
        return None
    if len(content) > _MAX_PICTURE_BYTES:
        return None
    if content.startswith(_PNG):
        # the header of a PNG begins with width and height
        width = int.from_bytes(content[16:20])
        height = int.from_bytes(content[20:24])
    elif content[:4] == b"RIFF" and content[8:16] == b"WEBPVP8X":
        # the header of an animated WebP contains width - 1 and height - 1
        width = 1 + int.from_bytes(content[24:27], "little")
        height = 1 + int.from_bytes(content[27:30], "little")
    else:
        return None
    if width * height > MAX_PIXELS:
        return None
    return content


def picture_type(content: bytes) -> str:
    """Returns the media type of a sample that `read_picture` has read."""
    return "image/png" if content.startswith(_PNG) else "image/webp"


AVERAGE = " (average of the weights)"


def prompt_label(sample: dict[str, Any]) -> str:
    """Returns the prompt, with a suffix if the sample was generated with the averaged weights."""
    prompt = str(sample.get("prompt", ""))
    if sample.get("weights") == "average":
        return f"{prompt}{AVERAGE}"
    return prompt


def spread_evenly(steps: list[Any], limit: int) -> list[Any]:
    """Selects at most `limit` entries at even distances, including the first and the last."""
    if len(steps) <= limit:
        return steps
    return [steps[round(k * (len(steps) - 1) / (limit - 1))] for k in range(limit)]


PAGE_PIXELS = 512  # the longer side of a picture on the page


def shrink_picture(content: bytes | None) -> tuple[str, bytes]:
    """Scales a picture to the size on the page. Returns its format and bytes. If Pillow is missing
    or cannot read the picture, the PNG is returned unchanged.
    """
    if content is None:
        return "png", b""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            resized = image.convert("RGB")
        resized.thumbnail((PAGE_PIXELS, PAGE_PIXELS))
        out = io.BytesIO()
        resized.save(out, format="WEBP", quality=88, method=4)
        return "webp", out.getvalue()
    except (ImportError, OSError, ValueError, SyntaxError):
        return "png", content


def data_url(content: bytes | None, kind: str = "png") -> str:
    """Returns the data URL of a picture for an `img` element; "" if there is no picture."""
    if content:
        return f"data:image/{kind};base64," + base64.b64encode(content).decode()
    return ""
