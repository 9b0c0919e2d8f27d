"""Checkpoints: whole or not at all, in one file or in several that any number of processes reads."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from isotype.errors import RunError
from isotype.runs.checkpoint import atomic_folder as folder_module
from isotype.runs.checkpoint.atomic_folder import SEAL, fault, write_folder
from isotype.runs.checkpoint.store import TENSORS, Checkpoint, CheckpointStore


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


def test_shared_memory_is_stored_once_and_shared_again(tmp_path):
    store, table = CheckpointStore(tmp_path), torch.arange(1000.0)
    tensors = {"optimizer.a.qmap1": table, "optimizer.b.qmap1": table, "model.half": table[500:], "model.none": torch.empty(0)}
    store.save(Checkpoint(1, tensors, {}))
    assert (store.path(1) / TENSORS).stat().st_size < 4 * 1500 + 600
    loaded = store.load(1)
    assert loaded.state == {}
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    assert loaded.tensors["optimizer.a.qmap1"] is loaded.tensors["optimizer.b.qmap1"]


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
def test_the_remedy_fits_what_the_system_said(tmp_path, monkeypatch, number, fix):
    def refuse(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder_module, "_sync", refuse)
    with pytest.raises(RunError) as raised:
        CheckpointStore(tmp_path).save(checkpoint(1))
    assert raised.value.fix.startswith(fix)


def test_a_full_disk_preserves_earlier_checkpoints(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module, "_sync", full)
    with pytest.raises(RunError, match=r"CK001.*No space left"):
        store.save(checkpoint(2))
    assert store.steps() == [1]
    assert store.newest_whole() == (1, [])
    assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_files_of_a_sealed_folder_are_as_readable_as_the_users_other_files(tmp_path):
    """safetensors makes its files readable by their owner alone."""
    CheckpointStore(tmp_path).save(checkpoint(1))
    (tmp_path / "other").write_text("")
    assert {file.stat().st_mode for file in (tmp_path / "step_1").iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_replacing_always_leaves_one_complete_folder(tmp_path):
    for text in ("old", "new"):
        write_folder(tmp_path / "adapter", lambda f, text=text: (f / "a.txt").write_text(text))
    assert (tmp_path / "adapter" / "a.txt").read_text() == "new"
    assert fault(tmp_path / "adapter") is None
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


WHOLE = {
    "model.a": torch.arange(30, dtype=torch.float32).view(5, 6),
    "optimizer.a.exp_avg": torch.arange(5, dtype=torch.bfloat16),
    "optimizer.a.step": torch.tensor(3.0),
}


class Together:
    """Threads in the place of processes."""

    def __init__(self, size):
        self.size, self.barrier, self.given = size, threading.Barrier(size), {}

    def of(self, rank):
        together = self

        class One:
            first = rank == 0

            def gather(self, value):
                together.given[rank] = value
                together.barrier.wait()
                return [together.given[r] for r in range(together.size)]

            def first_does(self, work, *, patiently=False):
                if rank == 0:
                    work()
                together.barrier.wait()

        return One()


def saved(folder, rows):
    """A checkpoint written by as many processes as there are ranges of rows."""
    together = Together(len(rows))

    def write(rank):
        tensors = {name: t[rows[rank].start : rows[rank].stop].clone() if t.dim() else t for name, t in WHOLE.items()}
        if rank:
            del tensors["optimizer.a.step"]
        checkpoint = Checkpoint(7, tensors, {"progress": {"step": 7}})
        CheckpointStore(folder).save_together(checkpoint, together.of(rank), part=rank, parts=len(rows))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    return CheckpointStore(folder)


@pytest.mark.parametrize("rows", [[range(5)], [range(3), range(3, 5)], [range(2), range(2, 4), range(4, 5), range(5, 5)]])
def test_any_number_of_processes_reads_its_rows(rows, tmp_path):
    store = saved(tmp_path, rows)
    assert store.newest_whole() == (7, [])
    whole = store.load(7)
    assert whole.state == {"progress": {"step": 7}}
    for name, tensor in WHOLE.items():
        assert torch.equal(whole.tensors[name], tensor)
        assert whole.tensors[name].dtype == tensor.dtype
    for asked in (range(5), range(1, 4), range(4, 5), range(5, 5)):
        some = store.load(7, rows=lambda name, asked=asked: None if name.endswith("step") else asked)
        assert torch.equal(some.tensors["model.a"], WHOLE["model.a"][asked.start : asked.stop])
        assert torch.equal(some.tensors["optimizer.a.exp_avg"], WHOLE["optimizer.a.exp_avg"][asked.start : asked.stop])
        assert some.tensors["optimizer.a.step"] == 3.0


def test_a_missing_part_makes_it_damaged(tmp_path):
    store = saved(tmp_path, [range(3), range(3, 5)])
    (store.path(7) / "tensors.1.safetensors").unlink()
    step, passed = store.newest_whole()
    assert step is None
    assert "tensors.1.safetensors is missing" in passed[0]
    with pytest.raises(RunError, match="is missing"):
        store.load(7)
