"""What a start leaves behind when no run begins, and what is said of a folder that holds none."""

import multiprocessing

import pytest

from isotype.errors import UsageError
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
