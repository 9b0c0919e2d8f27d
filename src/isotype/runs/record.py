"""The records that a run writes while it trains: `metrics.jsonl` and `precision.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..observe import Observation
from ..observe.record import as_read, as_written, noted
from ..precision.resolve import Resolved
from .checkpoint.atomic_folder import write_text
from .folder import RunFolder


class Metrics:
    """Appends to a file; a last line cut short by a kill is dropped on resume."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, **facts: Any) -> None:
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

    def cut_after(self, step: int) -> None:
        """Removes the lines after `step`, which the resumed run will write again."""
        remaining = [row for row in self.read() if isinstance(row.get("step"), int) and row["step"] <= step]
        write_text(self.file, "".join(json.dumps(row) + "\n" for row in remaining))


PRECISION_FILE = "precision.json"


class PrecisionRecord:
    """The record of one run, in its folder.

    task_roles  roles that only this kind of run has
    lora_branch `model.lora_branch`: fp32 where the adapters' own products have a dtype of their own
    writes      False in the other processes of a run: they judge their own observations, and the first process writes the file
    """

    def __init__(
        self, folder: RunFolder, resolved: Resolved, task_roles: Iterable[str] = (), *, lora_branch: str = "compute", writes: bool = True
    ) -> None:
        self.folder, self.resolved, self.task_roles, self.writes = folder, resolved, tuple(task_roles), writes
        self._branch = {"lora_branch": {"value": "fp32", "reason": "model.lora_branch"}} if lora_branch == "fp32" else {}
        self._observed: dict[str, Any] = {}

    @property
    def observed(self) -> Mapping[str, Mapping[str, int]]:
        """Role -> dtype -> how many things of the role had it when it was last observed."""
        found: Mapping[str, Mapping[str, int]] = self._observed.get("observed", {})
        return found

    def add(self, seen: Observation) -> None:
        """Adds an observation; roles that it does not contain keep their earlier counts. Raises DtypeError DT003."""
        self._observed = noted(self._observed, seen)
        if self.writes:
            declared = {
                "precision": self.resolved.text,
                "preset": self.resolved.preset,
                "declared": {**self.resolved.as_json(), **self._branch},
            }
            written = as_written(self._observed, self.task_roles, compute=self.resolved.precision.compute)
            self.folder.write_json(PRECISION_FILE, {**declared, **written})
        seen.raise_if_violated()

    def watched(self, what: Iterable[str]) -> None:
        """What was watched beside steps and files: for `not watched`."""
        self._observed["watched"] = list(what)

    def restore(self, step: int) -> None:
        """Reads the observations of an earlier part of this run, up to `step`. Where the file is gone or damaged, they begin anew."""
        self._observed = {}
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._observed = as_read(self.folder.read_json(PRECISION_FILE), step)
