"""The tensors of a checkpoint in several files: each process of a sharded run writes its rows, and any number of processes reads them.

`tensors.safetensors` has the first process's rows, and every tensor that is not sharded; `tensors.1.safetensors` has the next rows, and so
on. A tensor in several files is their rows in this order; a checkpoint of one process is the case of one file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

TENSORS = "tensors.safetensors"
PARTS = "parts"  # in the checkpoint's state: the number of files
Rows: TypeAlias = Callable[[str], "range | None"]  # the rows of a tensor that a process reads; None: all


def file_of(part: int) -> str:
    return TENSORS if not part else f"tensors.{part}.safetensors"


def read_parts(folder: Path, parts: int, rows: Rows) -> dict[str, Tensor]:
    """Every tensor, or of each the rows that are asked for: no process holds more than it asks for."""
    pieces: dict[str, list[Any]] = {}
    with ExitStack() as files:
        for part in range(parts):
            file = files.enter_context(safe_open(folder / file_of(part), framework="pt"))
            for name in file.keys():  # noqa: SIM118  # not a mapping
                piece = file.get_slice(name)
                whole = not piece.get_shape() or (parts == 1 and rows(name) is None)
                pieces.setdefault(name, []).append(file.get_tensor(name) if whole else piece)
        return {name: _joined(its, rows(name)) for name, its in pieces.items()}


def _joined(pieces: list[Any], rows: range | None) -> Tensor:
    if isinstance(pieces[0], Tensor):
        return pieces[0]
    sizes = [piece.get_shape()[0] for piece in pieces]
    wanted = range(sum(sizes)) if rows is None else rows
    found, begin = [], 0
    for piece, size in zip(pieces, sizes):
        first, last = max(wanted.start, begin), min(wanted.stop, begin + size)
        if first < last:
            found.append(piece[first - begin : last - begin])
        begin += size
    if not found:
        empty: Tensor = pieces[0][:0]
        return empty
    return found[0] if len(found) == 1 else torch.cat(found)


def needed(state: dict[str, Any]) -> int:
    """The number of files of a checkpoint with this state, taken out of it. Raises TypeError for a value that no run writes."""
    parts = state.pop(PARTS, 1)
    if type(parts) is not int or parts < 1:
        raise TypeError(f"{PARTS} is {parts!r}")
    return parts
