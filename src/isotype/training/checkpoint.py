"""What a checkpoint of a run holds besides tensors of the model: its progress, and the random state of every process.

With the same number of processes a resumed run is bit-identical. With another number it draws other random numbers. The first process's
state is where a run of one process has its own, so that either can go on with the other's checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.world import World
from ..runs.checkpoint.snapshot import random_state, restore_random_state

OTHERS = "random_of_other_processes"  # in state.json: of the ranks from 1 on


@dataclass
class Progress:
    """The part of a checkpoint that is not tensors."""

    step: int = 0
    position: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    without_gain: int = 0
    evaluated: str | None = None
    """A hash of the evaluation rows that `best_loss` and `without_gain` are of."""
    trained_seconds: float = 0.0
    units: int = 0
    """Tokens or pictures seen."""

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> Progress:
        """Reads the values of a checkpoint. Older runs name `units` `tokens`, and have the seconds of their samples."""
        named = {("units" if name == "tokens" else name): value for name, value in values.items()}
        return cls(**{name: value for name, value in named.items() if name != "sampled_seconds"})

    def __post_init__(self) -> None:
        """Checks the values, which come from a file. Raises  TypeError for a value that no run writes."""
        for name in ("step", "position", "without_gain", "units"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise TypeError(f"progress.{name} is {getattr(self, name)!r}")
        for name in ("best_loss", "trained_seconds"):
            if not isinstance(getattr(self, name), float) and (name == "best_loss" or type(getattr(self, name)) is not int):
                raise TypeError(f"progress.{name} is {getattr(self, name)!r}")
        if self.best_step is not None and type(self.best_step) is not int:
            raise TypeError(f"progress.best_step is {self.best_step!r}")
        if self.evaluated is not None and type(self.evaluated) is not str:
            raise TypeError(f"progress.evaluated is {self.evaluated!r}")

    def evaluate_on(self, rows: str) -> None:
        """Forgets the best evaluation where it was of other rows.

        rows  a hash of the evaluation rows
        """
        if self.evaluated not in (None, rows):
            self.best_loss, self.best_step, self.without_gain = math.inf, None, 0
        self.evaluated = rows


def gathered_random_state(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON) for a checkpoint. All processes call it; the first one writes."""
    tensors, state = random_state()
    if world.size == 1:
        return tensors, {"random": state}
    texts = {name: base64.b64encode(t.numpy().tobytes()).decode() for name, t in tensors.items()}
    _, *others = world.gather({"tensors": texts, "state": state})
    return tensors, {"random": state, OTHERS: others}


def restore_random_state_of_rank(tensors: dict[str, Tensor], state: Mapping[str, Any], world: World, *, seed: tuple[int, int]) -> int:
    """Puts back the state that this rank had; a rank that had none draws from `seed`, the run's and the step's.

    ->  the number of processes that wrote the checkpoint
    """
    others = state.get(OTHERS, [])
    if world.rank == 0:
        restore_random_state(tensors, state["random"])
    elif world.rank <= len(others):
        own = others[world.rank - 1]
        raw = {name: torch.tensor(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in own["tensors"].items()}
        restore_random_state(raw, own["state"])
    else:
        seed_of_rank(*seed, world.rank)
    return len(others) + 1


def seed_of_rank(seed: int, step: int, rank: int) -> None:
    """Draws of their own for each process, the same in every run: dropout must differ between rows, whichever process computes them."""
    import numpy as np

    own = int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
