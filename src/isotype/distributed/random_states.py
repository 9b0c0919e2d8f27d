"""The random state of every process in a checkpoint.

With the same number of processes a resumed run is bit-identical. With another number it draws other random numbers.

The first process's state is where a run of one process has its own, so that either can go on with the other's checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..runs.checkpoint.snapshot import random_state, restore_random_state
from .world import World

OTHERS = "random_of_other_processes"  # in state.json: of the ranks from 1 on


def gathered_random_state(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON) for a checkpoint. All processes call it; the first one writes."""
    tensors, state = random_state()
    if world.size == 1:
        return tensors, {"random": state}
    texts = {name: base64.b64encode(t.numpy().tobytes()).decode() for name, t in tensors.items()}
    _, *others = world.gather({"tensors": texts, "state": state})
    return tensors, {"random": state, OTHERS: others}


def restore_own_random_state(tensors: dict[str, Tensor], state: Mapping[str, Any], world: World, *, seed: tuple[int, int]) -> int:
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
    """Draws of their own for each process, the same in every run: dropout must differ between rows, whoever computes them."""
    import numpy as np

    own = int.from_bytes(hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()[:4])
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
