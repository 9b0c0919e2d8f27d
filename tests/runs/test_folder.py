"""A run's folder: what a start leaves when no run begins, and checkpoints that are whole or not there at all."""

import errno
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from isotype.errors import RunError, UsageError
from isotype.runs.checkpoint import atomic_folder as folder_module
from isotype.runs.checkpoint.atomic_folder import SEAL, fault, write_folder
from isotype.runs.checkpoint.store import TENSORS, Checkpoint, CheckpointStore
from isotype.runs.folder import LOCK, RunFolder, require_run


def failed_start(path, *files):
    """One that writes these files."""
    with RunFolder(path).held():
        for name in files:
            (path / name).write_text("{}")


def test_a_failed_start_removes_the_folders_it_made(tmp_path):
    failed_start(tmp_path / "runs/new/one")
    assert list(tmp_path.iterdir()) == []


def _hold(path, held, end):
    with RunFolder(path).held():
        held.set()
        end.wait()


def test_the_folder_of_another_run_is_left_alone(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", held, end))
    other.start()
    held.wait()
    with pytest.raises(UsageError, match="in use by another run"), RunFolder(tmp_path / "run").held():
        raise AssertionError
    assert (tmp_path / "run" / LOCK).exists()
    end.set()
    other.join()
    assert other.exitcode == 0
    assert not (tmp_path / "run").exists()


def test_a_folder_of_an_adapter_alone_is_named_as_one(tmp_path):
    (tmp_path / "run/adapter").mkdir(parents=True)
    (tmp_path / "run/adapter/adapter_config.json").write_text("{}")
    for path in (tmp_path / "run", tmp_path / "run/adapter"):
        with pytest.raises(UsageError, match=r"no resolved\.yaml there.*adapter is a PEFT adapter") as refused:
            require_run(path)
        assert repr(str(tmp_path / "run/adapter")) in refused.value.fix


# --- Checkpoints: whole or not at all. `tests/distributed` has those that several processes write and read.


def checkpoint(step: int, size: int = 64) -> Checkpoint:
    return Checkpoint(
        step, {"model.w": torch.full((size,), float(step)), "optimizer.w.step": torch.tensor(step)}, {"progress": {"step": step}}
    )


def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(3))
    loaded = store.load(3)
    assert loaded.state == {"progress": {"step": 3}}
    assert loaded.tensors["model.w"].tolist() == [3.0] * 64
    assert loaded.tensors["optimizer.w.step"].ndim == 0


def test_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        store.save(checkpoint(step), best=step == 2)
    assert store.steps() == [2, 4, 5]
    assert store.best == 2


def damage_truncate(path: Path):
    os.truncate(path / TENSORS, 100)


def damage_flip_a_bit(path: Path):
    content = bytearray((path / TENSORS).read_bytes())
    content[-5] ^= 1
    (path / TENSORS).write_bytes(content)


def damage_unseal(path: Path):
    (path / SEAL).unlink()


def damage_seal(path: Path):
    (path / SEAL).write_text('{"files": {"../../x": {"bytes": 1, "sha256": ""}}}')


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip_a_bit, damage_unseal, damage_seal])
def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    store.save(checkpoint(2))
    damage(store.path(2))
    step, passed = store.newest_whole()
    assert step == 1
    assert len(passed) == 1
    assert "step_2" in passed[0]
    with pytest.raises(RunError, match="CK002"):
        store.load(2)


@pytest.mark.parametrize(("number", "fix"), [
    (errno.ENOSPC, "free space, then resume"), (errno.EDQUOT, "free space, then resume"), (errno.EROFS, "make it writable, then resume"),
    (errno.EFBIG, "raise the limit on the size of a file (ulimit -f), then resume"), (errno.EMFILE, "raise the limit on open files"),
    (errno.EIO, "check the disk for faults"),
    (errno.EACCES, "make it writable, then resume"), (errno.ENOENT, "another program removed or renamed a folder of the run"),
])  # fmt: skip
def test_the_remedy_fits_what_the_system_said_and_earlier_checkpoints_stay(tmp_path, monkeypatch, number, fix):
    def refuse(path):
        raise OSError(number, os.strerror(number))

    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    monkeypatch.setattr(folder_module, "_sync", refuse)
    with pytest.raises(RunError, match="CK001") as raised:
        store.save(checkpoint(2))
    assert raised.value.fix.startswith(fix)
    assert store.newest_whole() == (1, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_replacing_always_leaves_one_complete_folder(tmp_path):
    for text in ("old", "new"):
        write_folder(tmp_path / "adapter", lambda f, text=text: (f / "a.txt").write_text(text))
    assert (tmp_path / "adapter" / "a.txt").read_text() == "new"
    assert fault(tmp_path / "adapter") is None
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]
