"""Runs that end early for certain: by the count of their checkpoints, not by the clock."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from isotype.config.load import LoadedConfig
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import train


def cut_back(folder: Path, last: int) -> None:
    """Makes a finished run one that was killed before its last checkpoint and its result."""
    shutil.rmtree(folder / f"checkpoints/step_{last}")
    shutil.rmtree(folder / "adapter")
    (folder / "result.json").unlink()


def interrupted_after(step: int, loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status of a run that gets SIGINT when it has saved the checkpoint of this step."""
    saved = CheckpointStore.save

    def save_then_interrupt(self, checkpoint, *, is_best=False):
        saved(self, checkpoint, is_best=is_best)
        if checkpoint.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", save_then_interrupt)
        return train(loaded)
