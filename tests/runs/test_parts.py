"""A checkpoint in several files: rows that any number of processes reads."""

from __future__ import annotations

import threading

import pytest
import torch

from isotype.errors import RunError
from isotype.runs.checkpoint.store import Checkpoint, CheckpointStore

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


@pytest.mark.full
@pytest.mark.parametrize("parts", ["2", 0, True, 2.0])
def test_a_number_of_parts_that_no_run_writes(parts, tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(Checkpoint(1, dict(WHOLE), {"parts": parts}))
    with pytest.raises(RunError, match="cannot be read: parts is"):
        store.load(1)
