"""Runs that end early for certain: by the count of their checkpoints, not by the clock."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.distributed.processes import environment
from tests.warm import interpreter

from isotype.config.load import LoadedConfig
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.tasks.choose import train

_DIES_AT_STEP_4 = """
import os, signal, sys
from pathlib import Path
from isotype.runs.checkpoint.store import CheckpointStore
from isotype.config.load import load
from isotype.tasks.choose import train
from isotype.tasks.language.task import LanguageTask

save = CheckpointStore.save

def save_then_die(self, checkpoint, *, best=False):
    save(self, checkpoint, best=best)
    if checkpoint.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)

CheckpointStore.save = save_then_die
train(load(Path(sys.argv[1]), [], {}))
"""


def killed_at_step_4(file: Path) -> None:
    """The run of a configuration's file, in a process that kills itself when it has saved the checkpoint of step 4."""
    # not a fork: autograd refuses to work in the fork of a process in which it has started threads
    died = subprocess.run([interpreter(), "-c", _DIES_AT_STEP_4, file], env=environment(), capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr


def cut_back(folder: Path, last: int) -> None:
    """Makes a finished run one that was killed before its last checkpoint and its result."""
    shutil.rmtree(folder / f"checkpoints/step_{last}")
    shutil.rmtree(folder / "adapter")
    (folder / "result.json").unlink()


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
