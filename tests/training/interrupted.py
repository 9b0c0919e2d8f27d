"""A run that is interrupted for certain: by the count of its checkpoints, not by the clock."""

from __future__ import annotations

import os
import signal

import pytest

from isotype.config.load import LoadedConfig
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import train


def interrupted_after(step: int, loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status of a run that gets SIGINT when it has saved the checkpoint of this step."""
    saved = CheckpointStore.save

    def save_then_interrupt(self, checkpoint, *, best=False):
        made = saved(self, checkpoint, best=best)
        if checkpoint.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStore, "save", save_then_interrupt)
        return train(loaded)
