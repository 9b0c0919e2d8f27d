"""Writes and reads the metrics of a run. `metrics.jsonl` has one line per logged step and one per
evaluation.

A run of 200,000 steps has 57 MB of lines. The report needs only a few thousand of these lines, and
`isotype ls` needs only the evaluations and the last lines. Lines are therefore selected while they
are read. A resumed run reads the file from its end.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import RunError
from .checkpoint.atomic_folder import suggest_fix, write_text
from .value_limits import parse_json

EVEN_ROWS = 8_000  # about how many evenly spaced steps a thinned curve has
BUCKETS = 1_000  # parts of a curve; each also keeps its extreme losses
MAX_OTHER_ROWS = 20_000  # rows without a training loss, such as evaluations
LAST_ROWS = 16  # rows that a summary reads; the last of them may have no finite loss
_BLOCK_BYTES = 1 << 16  # bytes that are read at once from the end of the file


class Metrics:
    """Appends rows of metrics to a file. If the process was killed while it wrote a line, this
    incomplete last line is removed when the run is resumed.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, **facts: Any) -> None:
        with self.file.open("a", encoding="utf-8") as f:
            f.write(json.dumps({k: v for k, v in facts.items() if v is not None}) + "\n")

    def sync(self) -> None:
        """Syncs the file to the disk, so that after a power failure every checkpoint still has the
        lines that were written before it.
        """
        if self.file.is_file():
            with self.file.open("rb") as f:
                os.fsync(f.fileno())

    def cut_after(self, step: int) -> None:
        """Removes the lines after `step`, which the resumed run will write again. Raises RunError
        CK001 when the file cannot be written.
        """
        if step < 0 or not self.file.is_file():
            write_text(self.file, "")
            return
        try:
            with self.file.open("rb+") as file:
                file.truncate(_find_end_of_step(file, step))
                os.fsync(file.fileno())
        except OSError as error:
            reason = f"{error.strerror or error}"
            raise RunError(
                f"could not write {self.file}: {reason}", code="CK001", fix=suggest_fix(reason)
            ) from error


def _find_end_of_step(file: IO[bytes], step: int) -> int:
    """Returns the position after the last complete line whose step is at most `step`. The file is
    read from its end.
    """
    end = file.seek(0, os.SEEK_END)
    size = _BLOCK_BYTES
    rest = b""  # the end of the line that begins before `end`
    while end > 0:
        start = max(0, end - size)
        file.seek(start)
        block = file.read(end - start) + rest
        # the block may begin in the middle of a line
        first_line = 0 if start == 0 else block.find(b"\n") + 1 or len(block)
        position = start + len(block)
        for line in reversed(block[first_line:].splitlines(keepends=True)):
            row = _parse_line(line)
            row_step = row.get("step") if isinstance(row, dict) else None
            if line.endswith(b"\n") and isinstance(row_step, int) and row_step <= step:
                return position
            position -= len(line)
        rest = block[:first_line]
        end = start
        size *= 2
    return 0


@dataclass
class MetricsRows:
    """Rows of a metrics file.

    broken            the numbers of the lines that cannot be read, counted from 1
    step_share        the fraction of the rows with a training loss that `rows` contains
    scaled_count      the number of rows with a loss scale, of which `overflow_count` overflowed;
                      rows that are not in `rows` are counted too
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    step_share: float = 1.0
    scaled_count: int = 0
    overflow_count: int = 0

    def count_overflow(self, row: dict[str, Any]) -> None:
        if "loss_scale" in row:
            self.scaled_count += 1
            self.overflow_count += row.get("overflow") is True


def read_all_rows(file: IO[bytes]) -> MetricsRows:
    """Reads every row."""
    result = MetricsRows()
    for _, row in _parse_lines(enumerate(file, start=1), result):
        result.count_overflow(row)
        result.rows.append(row)
    return result


def read_thinned_rows(file: IO[bytes]) -> MetricsRows:
    """Reads every row and returns a selection. It contains about EVEN_ROWS evenly spaced steps, and
    at most MAX_OTHER_ROWS rows without a training loss. The steps are also divided into about
    BUCKETS parts. Of each part, the selection contains three steps: those with the lowest loss, the
    highest loss and the first loss that is not finite.
    """
    line_count = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    file.seek(0)
    stride = max(1, line_count // EVEN_ROWS)
    bucket_size = max(1, line_count // BUCKETS)
    result = MetricsRows()
    row_by_number: dict[int, dict[str, Any]] = {}
    bucket = _Bucket()
    step_count = other_count = 0
    number = 0
    row: dict[str, Any] = {}
    for number, row in _parse_lines(enumerate(file, start=1), result):
        result.count_overflow(row)
        if "loss" not in row:
            other_count += 1
            if other_count <= MAX_OTHER_ROWS:
                row_by_number[number] = row
            continue
        step_count += 1
        if step_count % stride == 0 or step_count == 1:
            row_by_number[number] = row
        bucket.add(number, row)
        if step_count % bucket_size == 0:
            row_by_number |= bucket.rows()
            bucket = _Bucket()
    row_by_number |= bucket.rows()
    if row:
        row_by_number[number] = row
    result.rows = [row_by_number[key] for key in sorted(row_by_number)]
    if step_count:
        result.step_share = sum("loss" in row for row in result.rows) / step_count
    return result


class _Bucket:
    """Keeps three of the rows that are added, with their line numbers: the rows with the lowest
    loss, the highest loss and the first loss that is not finite.
    """

    def __init__(self) -> None:
        self.lowest = self.highest = self.infinite = (0, {"loss": math.nan})

    def add(self, number: int, row: dict[str, Any]) -> None:
        loss = row["loss"]
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            if not self.infinite[0]:
                self.infinite = (number, row)
            return
        if not loss >= self.lowest[1]["loss"]:
            self.lowest = (number, row)
        if not loss <= self.highest[1]["loss"]:
            self.highest = (number, row)

    def rows(self) -> dict[int, dict[str, Any]]:
        extremes = (self.lowest, self.highest, self.infinite)
        return {number: row for number, row in extremes if number}


def read_last_rows(file: IO[bytes]) -> MetricsRows:
    """Reads the evaluations and the last LAST_ROWS rows. Other lines are not parsed."""
    evaluations: list[tuple[int, bytes]] = []
    last_lines = deque[tuple[int, bytes]](maxlen=LAST_ROWS)
    for number, line in enumerate(file, start=1):
        if b'"eval_loss"' in line:
            evaluations.append((number, line))
        else:
            last_lines.append((number, line))
    result = MetricsRows()
    lines = sorted([*evaluations[-MAX_OTHER_ROWS:], *last_lines])
    result.rows = [row for _, row in _parse_lines(lines, result)]
    return result


def read_last_value(file: Path, step: int, key: str) -> Any:
    """Returns the value of a key in the last row of a step that has the key; None if there is none."""
    value = None
    with file.open("rb") as lines:
        matches = (
            (n, line) for n, line in enumerate(lines, start=1) if f'"{key}"'.encode() in line
        )
        for _, row in _parse_lines(matches, MetricsRows()):
            if row.get("step") == step and key in row:
                value = row[key]
    return value


def _parse_lines(
    lines: Iterable[tuple[int, bytes]], result: MetricsRows
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the row of each line. Adds the numbers of lines that cannot be read to
    `result.broken`.
    """
    for number, line in lines:
        row = _parse_line(line)
        if row is None:
            result.broken.append(number)
        elif isinstance(row, dict):
            yield number, row


def _parse_line(line: bytes) -> Any:
    """Returns the value of a line; None for a line that cannot be read."""
    try:
        return parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
