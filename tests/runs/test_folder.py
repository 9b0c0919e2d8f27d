"""A run's folder: what a start leaves when no run begins, and checkpoints that are whole or not
there at all.
"""

import errno
import multiprocessing
import os

import pytest
import torch

from isotype.errors import RunError, UsageError
from isotype.runs.checkpoint.store import TENSORS, Checkpoint, CheckpointStore
from isotype.runs.folder import LOCK, RunFolder, require_run
from tests.api import SEAL, find_damage, write_file, write_folder
from tests.api import atomic_folder as folder_module


def test_a_failed_start_removes_the_folders_it_made(tmp_path):
    with RunFolder(tmp_path / "runs/new/one").lock():
        pass
    assert list(tmp_path.iterdir()) == []


def _hold(path, held, end):
    with RunFolder(path).lock():
        held.set()
        end.wait()


def test_the_folder_of_another_run_is_left_alone(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "run", held, end))
    other.start()
    held.wait()
    with (
        pytest.raises(UsageError, match="in use by another run"),
        RunFolder(tmp_path / "run").lock(),
    ):
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
        with pytest.raises(
            UsageError, match=r"no resolved\.yaml there.*adapter is a PEFT adapter"
        ) as refused:
            require_run(path)
        assert repr(str(tmp_path / "run/adapter")) in refused.value.fix


# --- Checkpoints: whole or not at all. `tests/distributed` has those that several processes write
# and read.


def checkpoint(step: int, size: int = 64) -> Checkpoint:
    return Checkpoint(
        step,
        {"model.w": torch.full((size,), float(step)), "optimizer.w.step": torch.tensor(step)},
        {"progress": {"step": step}},
    )


def test_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        store.save(checkpoint(step), is_best=step == 2)
    assert store.steps() == [2, 4, 5]
    assert store.best == 2


def test_a_damaged_checkpoint_is_skipped_with_a_message(tmp_path, subtests):
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    tensors, seal = store.path(2) / TENSORS, store.path(2) / SEAL
    for damage in (
        lambda: os.truncate(tensors, 100),
        lambda: tensors.write_bytes(tensors.read_bytes()[:-1] + b"x"),
        lambda: seal.unlink(),
        lambda: seal.write_text('{"files": {"../../x": {"bytes": 1, "sha256": ""}}}'),
    ):
        with subtests.test():
            store.save(checkpoint(2))
            damage()
            step, passed = store.find_newest_intact()
            assert step == 1
            assert [line.split()[1] for line in passed] == ["step_2"]
            with pytest.raises(RunError, match="CK002"):
                store.load(2)


def test_the_remedy_fits_what_the_system_said_and_earlier_checkpoints_stay(
    tmp_path, monkeypatch, subtests
):
    store = CheckpointStore(tmp_path)
    store.save(checkpoint(1))
    for number, fix in (
        (errno.ENOSPC, "free space, then resume"),
        (errno.EROFS, "make it writable, then resume"),
        (errno.EFBIG, "raise the limit on the size of a file (ulimit -f), then resume"),
        (errno.EMFILE, "raise the limit on open files"),
        (errno.EIO, "check the disk for faults"),
        (errno.ENOENT, "another program removed or renamed a folder of the run"),
    ):

        def refuse(path, number=number):
            raise OSError(number, os.strerror(number))

        with subtests.test(fix):
            monkeypatch.setattr(folder_module, "_sync", refuse)
            with pytest.raises(RunError, match="CK001") as raised:
                store.save(checkpoint(2))
            assert raised.value.fix.startswith(fix)
            assert store.find_newest_intact() == (1, [])
            assert [p.name for p in tmp_path.iterdir()] == ["step_1"]


def test_replacing_always_leaves_one_complete_folder(tmp_path):
    for text in ("old", "new"):
        write_folder(tmp_path / "adapter", lambda f, text=text: (f / "a.txt").write_text(text))
    assert (tmp_path / "adapter" / "a.txt").read_text() == "new"
    assert find_damage(tmp_path / "adapter") is None
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("(os error 28)")]
)
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, error):
    """safetensors raises errors of the disk as its own class, with their number in the text."""
    file = tmp_path / "dog.safetensors"
    assert write_file(file, lambda path: path.write_text("a"), next_action="export again") == 1

    def fail(path):
        path.write_text("half")
        raise error

    with pytest.raises(RunError, match=r"could not write .*dog\.safetensors: ") as raised:
        write_file(file, fail, next_action="export again")
    assert raised.value.code == "CK001"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "a"
