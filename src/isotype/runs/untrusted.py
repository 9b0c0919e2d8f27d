"""Checks of a run folder from an untrusted source: it cannot allow code to run on the user's behalf, and Isotype writes through no link."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.load import LoadedConfig
from ..errors import UsageError

CONSENT = "ISOTYPE_TRUST_REMOTE_CODE"


def refuse_code_of(loaded: LoadedConfig, folder: Path) -> None:
    """Raises  UsageError where a run's own file says `trust_remote_code: true` and the user, now, does not."""
    if not loaded.config.model.trust_remote_code or os.environ.get(CONSENT) == "1" or "model.trust_remote_code" in loaded.given:
        return
    raise UsageError(
        f"{folder}: its model {loaded.config.model.name} brings its own code, and a run folder cannot consent to running it",
        fix=f"if you trust both: {CONSENT}=1 isotype ..., or model.trust_remote_code=true with --resume",
    )


def refuse_foreign_entries(folder: Path) -> None:
    """Raises  UsageError for what a run would write through or wait at: a link that leads out of the folder, a pipe, a device, a socket.

    The folder itself may be a link.
    """
    inside = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise UsageError(
                    f"{path}: a link out of the run's folder, to {os.readlink(path)}: nothing is written through it",
                    fix="put the files themselves there, or make the whole run folder a link",
                )
            if not path.is_file() and not path.is_dir() and path.exists():
                raise UsageError(f"{path}: neither a file nor a folder", fix="remove it")
