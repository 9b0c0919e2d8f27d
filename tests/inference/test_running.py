"""A run that goes on while it is looked at removes checkpoints: the newest one is taken, whichever that is by then."""

from __future__ import annotations

import shutil

import pytest
import torch

from isotype.errors import RunError, UsageError
from isotype.inference.loaded import _load_newest
from isotype.runs.checkpoint import store as store_module
from isotype.runs.checkpoint.store import Checkpoint, CheckpointStore


def saved(folder, *steps):
    store = CheckpointStore(folder)
    for step in steps:
        store.save(Checkpoint(step, {"w": torch.full((2,), float(step))}, {}))
    return store


def test_a_checkpoint_removed_while_it_is_read_is_replaced_by_the_next(tmp_path, monkeypatch):
    store = saved(tmp_path, 2)
    load = CheckpointStore.load

    def overtaken(self, step):
        if step == 2:
            saved(tmp_path, 4)
            shutil.rmtree(self.path(2), ignore_errors=True)
        return load(self, step)

    monkeypatch.setattr(CheckpointStore, "load", overtaken)
    found = _load_newest(store, tmp_path)
    assert found.step == 4
    assert found.tensors["w"].tolist() == [4.0, 4.0]


def test_a_checkpoint_removed_before_it_is_read_is_replaced_by_the_next(tmp_path, monkeypatch):
    store = saved(tmp_path, 2)
    read_parts = store_module.read_parts

    def overtaken(folder, *others):
        if "step_2" in str(folder):
            saved(tmp_path, 4)
            shutil.rmtree(tmp_path / "step_2")
            # what torch says where safetensors has read the header and the tensors are mapped by name
            raise RuntimeError(f"unable to open file <{folder}> in read-only mode: No such file or directory (2)")
        return read_parts(folder, *others)

    monkeypatch.setattr(store_module, "read_parts", overtaken)
    assert _load_newest(store, tmp_path).step == 4


def test_a_newer_one_is_found_where_all_that_were_looked_at_have_gone(tmp_path, monkeypatch):
    store = saved(tmp_path, 2)
    fault = CheckpointStore.fault

    def overtaken(self, step):
        if step == 2:
            shutil.rmtree(self.path(2), ignore_errors=True)
            saved(tmp_path, 4)
        return fault(self, step)

    monkeypatch.setattr(CheckpointStore, "fault", overtaken)
    assert _load_newest(store, tmp_path).step == 4


def test_a_complete_checkpoint_that_cannot_be_read_is_reported(tmp_path, monkeypatch):
    store = saved(tmp_path, 2)

    def refuse(self, step):
        raise RunError("not one of ours", code="CK002", fix="")

    monkeypatch.setattr(CheckpointStore, "load", refuse)
    with pytest.raises(RunError, match="not one of ours"):
        _load_newest(store, tmp_path)


def test_a_run_without_a_whole_checkpoint_is_refused(tmp_path):
    with pytest.raises(UsageError, match="neither a result nor a whole checkpoint yet"):
        _load_newest(CheckpointStore(tmp_path), tmp_path)
