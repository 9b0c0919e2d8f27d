"""`metrics.jsonl`: one JSON object per line, flushed at once; a resumed run removes the lines after its checkpoint."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from .checkpoint.atomic_folder import write_text


class Metrics:
    """Appends to a file; a last line cut short by a kill is dropped on resume."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._written = False

    @property
    def removed(self) -> bool:
        """Whether another program removed the file since the last line."""
        return self._written and not self.file.exists()

    def write(self, **facts: Any) -> None:
        self._written = True
        with self.file.open("a", encoding="utf-8") as f:
            f.write(json.dumps({k: v for k, v in facts.items() if v is not None}) + "\n")

    def sync(self) -> None:
        """Syncs the file to the disk, so that after a power failure no checkpoint exists without its earlier lines."""
        if self.file.is_file():
            with self.file.open("rb") as f:
                os.fsync(f.fileno())

    def read(self) -> list[dict[str, Any]]:
        if not self.file.is_file():
            return []
        rows = []
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def missing_before(self, step: int, *, every: int) -> int | None:
        """The last step that has a line, where lines between it and `step` are missing; None where none is.

        every  steps from one line to the next; those of an earlier part of the run may have been further apart
        """
        logged = (row["step"] for row in self.read() if isinstance(row.get("step"), int) and "event" not in row)
        steps = sorted(number for number in logged if number <= step)
        last = steps[-1] if steps else 0
        apart = max([every, *(after - before for before, after in pairwise(steps))])
        return last if last < step and (not steps or step - last >= apart) else None

    def cut_after(self, step: int) -> None:
        """Removes the lines after `step`, which the resumed run will write again."""
        remaining = [row for row in self.read() if isinstance(row.get("step"), int) and row["step"] <= step]
        write_text(self.file, "".join(json.dumps(row) + "\n" for row in remaining))
