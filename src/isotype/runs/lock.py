"""The lock of a run folder, held by the process that trains in it. The kernel releases it when the process ends or is killed."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError

LOCK = ".lock"


def take_lock(handle: int, path: Path) -> None:
    """Locks the run folder `path`, whose lock file is open as `handle`. Raises UsageError when another process has the lock, or had it and
    has just removed the file with it."""
    try:
        import fcntl
    except ImportError:  # Windows has no flock; there two runs in one folder are not noticed
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = os.fstat(handle).st_nlink > 0
    except OSError:
        held = False
    if not held:
        raise UsageError(f"run.folder: {path} is in use by another run", fix="wait for it, or give another folder: --out FOLDER")


def is_held(path: Path) -> bool:
    """Whether a process trains in this folder now. The check itself holds the lock for some microseconds."""
    try:
        import fcntl

        handle = os.open(path / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name is not waited for
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)
