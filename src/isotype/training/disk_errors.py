"""Turns an error of the disk into a line that names the file and the last good checkpoint."""

from __future__ import annotations

from pathlib import Path

from ..errors import IsotypeError, RunError, UsageError
from ..runs.checkpoint.atomic_folder import refused, writable_again
from ..runs.checkpoint.store import CheckpointStore
from ..runs.folder import RunFolder


def refused_by_disk(error: Exception, folder: RunFolder) -> Exception:
    """Turns a disk error in the run's folder into CK001 with the last good checkpoint, and one elsewhere into a usage error. Returns other
    errors unchanged."""
    gone = RunError(
        f"{folder.path}: the run's folder is gone",
        code="CK001",
        fix="start it again; a folder that was renamed: isotype train --resume ITS_NEW_NAME",
    )
    if isinstance(error, IsotypeError):
        # a file of the run could not be written, because its folder was removed
        return gone if error.code == "CK001" and not folder.path.is_dir() else error
    reason = refused(error)
    if reason is None:
        return error
    name = str(error.filename) if isinstance(error, OSError) and error.filename else ""
    if name and not Path(name).absolute().is_relative_to(folder.path.absolute()):
        return UsageError(f"{name[:200]}: {reason}")
    step, _ = CheckpointStore(folder.checkpoints).newest_whole()
    good = f"last good checkpoint: {folder.checkpoints / f'step_{step}'}" if step is not None else "there is no checkpoint yet"
    if not folder.path.is_dir():
        return gone
    message = f"{name}: {reason}" if name else reason
    return RunError(f"{message}\n  saved     {good}", code="CK001", fix=f"{writable_again(reason)}, then resume")
