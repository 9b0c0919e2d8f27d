"""Saves and loads the checkpoints of a run, in `checkpoints/step_N/`. The store retains the newest
few checkpoints and the best one, and finds the newest complete checkpoint.

Each process of a sharded run writes its rows of a tensor, and any number of processes can read
these rows. `tensors.safetensors` has the first process's rows and every tensor that is not sharded,
`tensors.1.safetensors` has the next rows, and so on. A tensor in several files is the concatenation
of their rows in this order.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import RunError
from .atomic_folder import (
    Processes,
    find_damage,
    find_damage_together,
    write_folder,
    write_folder_together,
    write_text,
)

_STEP = re.compile(r"^step_(\d+)$")
STATE = "state.json"
ALIASES = (
    "same_tensors"  # in STATE: name -> the name in TENSORS under which the same tensor is saved
)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: a dictionary of tensors, and everything else as JSON. There is
    no pickle, so loading an untrusted checkpoint executes no code.
    """

    step: int
    tensors: dict[str, Tensor] = field(repr=False)
    state: dict[str, Any] = field(repr=False)


class CheckpointStore:
    """Retains the `keep` newest checkpoints and the checkpoint that is marked as best."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, complete or not, in ascending order."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(m[1])
            for folder in self.folder.iterdir()
            if (m := _STEP.match(folder.name)) and folder.is_dir()
        )

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

    def clean_up(self, best_step: int | None) -> None:
        """Prepares the folder for a resumed run. The method removes half-written folders, and marks
        the checkpoint of step `best_step` as the best. The checkpoint from which the run continues
        stores this step.

        The wrong checkpoint may be marked as the best for two reasons: the process was killed
        before it marked a new checkpoint, or the newest checkpoint is damaged.
        """
        for leftover in self.folder.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if best_step != self.best:
            if best_step is not None and self.path(best_step).is_dir():
                self.mark_best(best_step)
            else:
                (self.folder / "best.json").unlink(missing_ok=True)

    def save(self, checkpoint: Checkpoint, *, is_best: bool = False) -> None:
        """Writes the checkpoint, marks it as the best if `is_best` is true, and removes old
        checkpoints. Raises RunError CK001 when the disk is full or read-only.
        """
        write_folder(self.path(checkpoint.step), lambda aside: _write(checkpoint, aside))
        self._mark_and_prune(checkpoint.step, is_best)

    def save_together(
        self,
        checkpoint: Checkpoint,
        processes: Processes,
        *,
        file_index: int,
        file_count: int,
        is_best: bool = False,
    ) -> None:
        """Saves a checkpoint as `save` does, but for a sharded run. All processes call this method,
        each with its own rows of the sharded tensors.

        file_index  the index of the file that this process writes. A process whose index is
                    `file_count` or higher writes no file
        file_count  the number of files
        """
        write_folder_together(
            self.path(checkpoint.step),
            lambda aside: _write(checkpoint, aside, file_index, file_count),
            processes,
        )
        processes.run_on_first(lambda: self._mark_and_prune(checkpoint.step, is_best))

    def _mark_and_prune(self, step: int, is_best: bool) -> None:
        """If `is_best` is true, marks the new checkpoint as the best. Then removes old checkpoints."""
        if is_best:
            self.mark_best(step)
        # A checkpoint of a later step is damaged, because otherwise the run would have resumed from
        # it. The damaged checkpoint must not displace an intact checkpoint.
        steps_to_keep = {
            *[existing for existing in self.steps() if existing <= step][-self.keep :],
            self.best,
        }
        for existing in self.steps():
            if existing not in steps_to_keep:
                shutil.rmtree(self.path(existing), ignore_errors=True)

    def find_damage(self, step: int, processes: Processes | None = None) -> str | None:
        """Returns a description of the damage of this checkpoint; None if the checkpoint is intact.

        processes  the processes that call this together; each computes the checksums of some files
        """
        if processes is None:
            return find_damage(self.path(step), needs=(TENSORS, STATE))
        return find_damage_together(self.path(step), (TENSORS, STATE), processes)

    def find_newest_intact(
        self, processes: Processes | None = None
    ) -> tuple[int | None, list[str]]:
        """Returns the step of the newest complete checkpoint, None if there is none, and messages
        about newer checkpoints that are damaged.

        processes  as in `find_damage`
        """
        damage_messages: list[str] = []
        steps = self.steps() if processes is None else processes.run_on_first(self.steps)
        for step in reversed(steps):
            reason = self.find_damage(step, processes)
            if reason is None:
                return step, damage_messages
            damage_messages.append(f"checkpoint step_{step} is damaged ({reason})")
        return None, damage_messages

    def load(
        self, step: int, select_rows: RowSelector | None = None, *, is_verified: bool = False
    ) -> Checkpoint:
        """Loads the checkpoint of a step.

        select_rows  the rows of each tensor that this process keeps; by default all
        is_verified  true if `find_damage` was called before, so that no checksum has to be computed
                     here
        Raises  RunError CK002 for a checkpoint that is incomplete, or that Isotype did not write
        """
        path = self.path(step)
        reason = None if is_verified else self.find_damage(step)
        if reason is None:
            try:
                state = json.loads((path / STATE).read_text(encoding="utf-8"))
                if isinstance(state, dict):
                    aliases = state.pop(ALIASES, {})  # earlier versions had none
                    tensors = read_tensors(
                        path, pop_file_count(state), select_rows or (lambda name: None)
                    )
                    return Checkpoint(step, restore_aliases(tensors, aliases), state)
                reason = f"{STATE} is not an object"
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                RecursionError,
                SafetensorError,
            ) as error:
                reason = f"cannot be read: {error}"
            except RuntimeError as error:
                # torch raises this if a file is removed while it is opened: a running run removes
                # its oldest checkpoints
                if (path / TENSORS).is_file():
                    raise
                reason = f"{TENSORS} is gone: {error}"
        raise RunError(
            f"checkpoint {path}: {reason}",
            code="CK002",
            fix=f"remove {path} and resume: the one before is taken",
        )


def _write(
    checkpoint: Checkpoint, folder: Path, file_index: int = 0, file_count: int = 1
) -> list[Path]:
    """Writes one process's files of a checkpoint and returns their paths."""
    if file_index >= file_count:
        return []
    tensors, aliases = deduplicate_tensors(checkpoint.tensors)
    save_file(tensors, folder / tensor_file_name(file_index))
    if file_index:
        return [folder / tensor_file_name(file_index)]
    state = {**checkpoint.state, ALIASES: aliases} | (
        {FILE_COUNT_KEY: file_count} if file_count > 1 else {}
    )
    (folder / STATE).write_text(json.dumps(state, indent=1, allow_nan=True) + "\n")
    return [folder / TENSORS, folder / STATE]


TENSORS = "tensors.safetensors"
FILE_COUNT_KEY = "parts"  # in the checkpoint's state: the number of files
# the rows of a tensor that a process reads; None: all
RowSelector: TypeAlias = Callable[[str], "range | None"]


def tensor_file_name(file_index: int) -> str:
    return TENSORS if not file_index else f"tensors.{file_index}.safetensors"


def read_tensors(folder: Path, file_count: int, select_rows: RowSelector) -> dict[str, Tensor]:
    """Returns every tensor, each with only the rows that `select_rows` returns for it, so that no
    process holds more rows than it needs.
    """
    pieces: dict[str, list[Any]] = {}
    with ExitStack() as files:
        for file_index in range(file_count):
            file = files.enter_context(
                safe_open(folder / tensor_file_name(file_index), framework="pt")
            )
            for name in file.keys():  # noqa: SIM118  # not a mapping
                piece = file.get_slice(name)
                reads_all = not piece.get_shape() or (file_count == 1 and select_rows(name) is None)
                pieces.setdefault(name, []).append(file.get_tensor(name) if reads_all else piece)
        return {
            name: _join_pieces(tensor_pieces, select_rows(name))
            for name, tensor_pieces in pieces.items()
        }


def _join_pieces(pieces: list[Any], rows: range | None) -> Tensor:
    if isinstance(pieces[0], Tensor):
        return pieces[0]
    sizes = [piece.get_shape()[0] for piece in pieces]
    row_range = range(sum(sizes)) if rows is None else rows
    slices = []
    piece_start = 0
    for piece, size in zip(pieces, sizes):
        start = max(row_range.start, piece_start)
        stop = min(row_range.stop, piece_start + size)
        if start < stop:
            slices.append(piece[start - piece_start : stop - piece_start])
        piece_start += size
    if not slices:
        empty: Tensor = pieces[0][:0]
        return empty
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def pop_file_count(state: dict[str, Any]) -> int:
    """Removes the entry with the number of files from a checkpoint's state, and returns this
    number. Raises TypeError for an invalid number.
    """
    file_count = state.pop(FILE_COUNT_KEY, 1)
    if type(file_count) is not int or file_count < 1:
        raise TypeError(f"{FILE_COUNT_KEY} is {file_count!r}")
    return file_count


def deduplicate_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns two dictionaries. The first contains the tensors on the CPU, and no two of its
    tensors share memory. If a tensor has several names, it is saved under only one of them. The
    second dictionary maps each other name to this name.
    """
    saved: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    name_by_view: dict[tuple[object, ...], str] = {}
    saved_storages: set[int] = set()
    for name, tensor in tensors.items():
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and name_by_view.setdefault(view, name) != name:
            aliases[name] = name_by_view[view]
            continue
        value = tensor.detach().contiguous().cpu()
        storage = value.untyped_storage().data_ptr()
        saved[name] = value.clone() if storage in saved_storages else value
        if tensor.numel():
            saved_storages.add(storage)
    return saved, aliases


def restore_aliases(tensors: dict[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Undoes `deduplicate_tensors`: returns a dictionary in which all names of one tensor refer to
    the same object again. Raises KeyError for an alias of a tensor that is missing.
    """
    return tensors | {name: tensors[saved] for name, saved in aliases.items()}
