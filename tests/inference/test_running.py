"""A run that goes on while it is looked at removes checkpoints: the newest one is taken, whichever that is by then."""

from __future__ import annotations

import shutil

import pytest
import torch

from isotype.errors import UsageError
from isotype.inference.loaded import load_newest
from isotype.runs.checkpoint.store import Checkpoint, CheckpointStore


def saved(folder, *steps):
    store = CheckpointStore(folder)
    for step in steps:
        store.save(Checkpoint(step, {"w": torch.full((2,), float(step))}, {}))
    return store


def test_a_checkpoint_removed_while_it_is_read_is_replaced_by_the_next(tmp_path, monkeypatch):
    saved(tmp_path / "checkpoints", 2)
    load = CheckpointStore.load

    def overtaken(self, step):
        if step == 2:
            saved(tmp_path / "checkpoints", 4)
            shutil.rmtree(self.path(2), ignore_errors=True)
        return load(self, step)

    monkeypatch.setattr(CheckpointStore, "load", overtaken)
    found = load_newest(tmp_path)
    assert found.step == 4
    assert found.tensors["w"].tolist() == [4.0, 4.0]


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="neither a result nor a whole checkpoint yet"):
        load_newest(tmp_path)
