"""`torchrun --max-restarts N` repeats the command after a process died: the run is resumed, and its existing folder is no error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import UsageError
from ..runs.folder import RESOLVED


def run_to_go_on_with(folder: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The run's folder where the launcher has started this command again and a run was begun there; else None.

    folder  run.folder as configured
    Raises  UsageError where restarts are asked for and the folder's name would be another one each time
    """
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    if "{name}" in folder:
        raise UsageError(
            f"torchrun --max-restarts {environ['TORCHELASTIC_MAX_RESTARTS']}: run.folder: {folder} has another name at each start",
            fix="give the folder, so that a restart finds the run: --out FOLDER",
        )
    begun = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (Path(folder) / RESOLVED).is_file()
    return Path(folder) if begun else None
