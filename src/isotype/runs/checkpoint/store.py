"""The checkpoints of a run, `checkpoints/step_N/`: retains the newest few and the best, and finds the newest complete one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...errors import RunError
from .atomic_folder import Processes, fault, write_folder, write_folder_together, write_text
from .parts import PARTS, TENSORS, Rows, file_of, needed, read_parts
from .shared_tensors import stored_once, under_every_name

_STEP = re.compile(r"^step_(\d+)$")
STATE = "state.json"
SAME = "same_tensors"  # in STATE: name -> the name in TENSORS under which the same tensor is saved


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name and everything else as JSON: no pickle, so a checkpoint from a stranger runs no code."""

    step: int
    tensors: dict[str, Tensor] = field(repr=False)
    state: dict[str, Any] = field(repr=False)


class CheckpointStore:
    """Retains the `keep` newest checkpoints and the one marked as best."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Steps with a folder, whole or not, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(int(m[1]) for p in self.folder.iterdir() if (m := _STEP.match(p.name)) and p.is_dir())

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    @property
    def best(self) -> int | None:
        try:
            return int(json.loads((self.folder / "best.json").read_text())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def mark_best(self, step: int) -> None:
        write_text(self.folder / "best.json", json.dumps({"step": step}) + "\n")

    def tidy(self, best: int | None) -> None:
        """Cleans up for a resumed run: removes half-written files, and marks as best the checkpoint that the resumed one names (`best`).

        The mark is wrong after a kill between writing a checkpoint and marking it, or when the newest checkpoint is damaged.
        """
        for rest in self.folder.glob(".step_*"):
            shutil.rmtree(rest, ignore_errors=True)
        if best != self.best:
            if best is not None and self.path(best).is_dir():
                self.mark_best(best)
            else:
                (self.folder / "best.json").unlink(missing_ok=True)

    def save(self, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        """Writes the checkpoint, marks it, then removes old ones. Raises RunError CK001 when the disk is full or read-only."""
        target = self.path(checkpoint.step)

        def fill(aside: Path) -> None:
            _write(checkpoint, aside)

        write_folder(target, fill)
        self._written(checkpoint.step, best)
        return target

    def save_together(self, checkpoint: Checkpoint, processes: Processes, *, part: int, parts: int, best: bool = False) -> Path:
        """The same by the processes of a sharded run, which all call it; each has its own rows of the sharded tensors.

        part, parts  which file this process writes, and how many there are; a process whose part is not below `parts` writes none
        """
        target = self.path(checkpoint.step)
        write_folder_together(target, lambda aside: _write(checkpoint, aside, part, parts), processes)
        processes.first_does(lambda: self._written(checkpoint.step, best))
        return target

    def _written(self, step: int, best: bool) -> None:
        """Marks a new checkpoint, then removes old ones."""
        if best:
            self.mark_best(step)
        # a later one was damaged, else the run had gone on from there: it must not take the place of a whole one
        kept = {*[other for other in self.steps() if other <= step][-self.keep :], self.best}
        for other in self.steps():
            if other not in kept:
                shutil.rmtree(self.path(other), ignore_errors=True)

    def fault(self, step: int) -> str | None:
        """Why this checkpoint cannot be trusted, or None."""
        return fault(self.path(step), needs=(TENSORS, STATE))

    def newest_whole(self) -> tuple[int | None, list[str]]:
        """(step of the newest complete checkpoint, messages about damaged newer ones). The step is None if none is complete."""
        passed: list[str] = []
        for step in reversed(self.steps()):
            reason = self.fault(step)
            if reason is None:
                return step, passed
            passed.append(f"checkpoint step_{step} is damaged ({reason})")
        return None, passed

    def load(self, step: int, rows: Rows | None = None) -> Checkpoint:
        """Raises  RunError CK002 for a checkpoint that is not whole, or whole and not one of ours.

        rows  which rows of each tensor this process keeps; by default all
        """
        path = self.path(step)
        reason = self.fault(step)
        if reason is None:
            try:
                state = json.loads((path / STATE).read_text(encoding="utf-8"))
                if isinstance(state, dict):
                    same = state.pop(SAME, {})  # earlier versions had none
                    tensors = read_parts(path, needed(state), rows or (lambda name: None))
                    return Checkpoint(step, under_every_name(tensors, same), state)
                reason = f"{STATE} is not an object"
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
                reason = f"cannot be read: {error}"
            except RuntimeError as error:
                # torch's word for a file that went while it was opened: a running run has removed its oldest checkpoint
                if (path / TENSORS).is_file():
                    raise
                reason = f"{TENSORS} is gone: {error}"
        raise RunError(f"checkpoint {path}: {reason}", code="CK002", fix=f"remove {path} and resume: the one before is taken")


def _write(checkpoint: Checkpoint, folder: Path, part: int = 0, parts: int = 1) -> list[Path]:
    """Returns the files written."""
    if part >= parts:
        return []
    tensors, same = stored_once(checkpoint.tensors)
    save_file(tensors, folder / file_of(part))
    if part:
        return [folder / file_of(part)]
    state = {**checkpoint.state, SAME: same} | ({PARTS: parts} if parts > 1 else {})
    (folder / STATE).write_text(json.dumps(state, indent=1, allow_nan=True) + "\n")
    return [folder / TENSORS, folder / STATE]
