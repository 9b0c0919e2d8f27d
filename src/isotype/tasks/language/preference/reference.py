"""The reference: log-probabilities of every answer under the model as the run starts, adapter on.

They are computed once, before step 1, and kept in the run folder. So no second model is held, and the reference is the same in full
fine-tuning, on a 4-bit base, from a started adapter, and after a start that changes the base.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ....data.pairs import Labelled, Pairs
from ....data.progress import watched
from ....distributed.agree import fingerprint_of_weights
from ....distributed.world import World
from ....errors import UsageError
from ....precision.parts import local_part
from ....training.task import eval_mode
from ....wording import counted

FILE = "reference.safetensors"
Header = list[tuple[str, str]]
Rows = Pairs | Labelled
SHARED = "shared"  # in place of a fingerprint where no process has the whole model


def add_reference(
    model: nn.Module, train: Rows, evaluation: Rows, *, log_probs: Callable[[Sequence[Any]], list[float]], batch_size: int,
    fingerprints: Mapping[str, str], folder: Path, world: World,
) -> Header:  # fmt: skip
    """Gives the rows their reference, from the run folder where it has one of these rows; returns a row of the header.

    log_probs  two values a row: of both answers of a pair, or of an answer and its partner
    Raises     UsageError where the folder's is of another model
    """
    shared = any(local_part(p) is not p for p in model.parameters())
    made_of = {**fingerprints, "model": SHARED if shared else fingerprint_of_weights(model)}
    path = folder / FILE
    begin, sides = time.perf_counter(), {"training": train, "evaluation": evaluation}
    known: dict[str, list[float]] = world.first_does(lambda: _kept(path, made_of))
    lacking = [name for name in sides if name not in known]
    for name in lacking:
        known[name] = _computed(model, sides[name], log_probs, batch_size, world)
    for name, pairs in sides.items():
        pairs.reference = np.asarray(known[name], np.float32)
    if not lacking:
        return [("reference", f"from {path}")]
    world.first_does(lambda: _keep(path, known, made_of))
    answers = sum(2 * len(sides[name]) for name in lacking)
    seconds = time.perf_counter() - begin
    return [
        ("reference", f"log-probabilities of {counted(answers, 'answer')} under the model as it starts, {seconds:.1f} s, kept in {path}")
    ]


def _computed(
    model: nn.Module, pairs: Rows, log_probs: Callable[[Sequence[Any]], list[float]], batch_size: int, world: World
) -> list[float]:
    """In the flat order. The processes take batches in turn, and all make as many passes, as a shared model needs."""
    by_length = np.argsort(pairs.lengths, kind="stable").tolist() if len(pairs) else []
    found = [0.0] * (2 * len(pairs))
    with eval_mode(model):
        for turn in watched(range(0, len(by_length), world.size * batch_size), "the reference's log-probabilities"):
            start = turn + world.rank * batch_size
            own = by_length[start : start + batch_size]
            values = log_probs([pairs[i] for i in own or by_length[:1]])
            for k, i in enumerate(own):
                found[2 * i : 2 * i + 2] = values[2 * k : 2 * k + 2]
    return world.sum(found)


def _kept(path: Path, made_of: Mapping[str, str]) -> dict[str, list[float]]:
    """What the folder has of the same rows; other rows are computed anew. Raises UsageError where it is of another model."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            found = {name: file.get_tensor(name).tolist() for name in ("training", "evaluation")}
    except (SafetensorError, OSError):
        return {}
    if said.get("model") not in (made_of["model"], SHARED) and made_of["model"] != SHARED:
        raise UsageError(
            f"{path}: the reference of another model than this run starts from",
            fix="the base or adapter that the run was begun with; or start a new run",
        )
    return {name: values for name, values in found.items() if said.get(name) == made_of.get(name)}


def _keep(path: Path, known: Mapping[str, list[float]], made_of: Mapping[str, str]) -> None:
    new = path.with_name(f"{path.name}.new")
    save_file({name: torch.tensor(values, dtype=torch.float32) for name, values in known.items()}, new, metadata=dict(made_of))
    os.replace(new, path)
