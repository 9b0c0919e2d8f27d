"""Finds the folder of this user for compiled kernels and for the results of their checks."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from ..environment.private_folder import NotPrivateError, make_private_folder, temporary_folder


class BuildError(Exception):
    """Raised if no library can be built. The message gives the reason in one line."""


def library_folder() -> Path:
    """Returns the folder in which libraries are stored. This is the folder in the environment
    variable ISOTYPE_CACHE, or `isotype` in the user's cache folder, or a temporary folder. A folder
    is skipped if this user cannot write to it, or if other users can write to it.

    ISOTYPE_CACHE=none means that tokens are not cached (`data.cache`). Libraries are still stored,
    in the temporary folder, because a library can only be loaded from a file.

    Raises  BuildError
    """
    setting = os.environ.get("ISOTYPE_CACHE", "")
    candidates: list[Path] = []
    if setting not in ("", "none"):
        candidates.append(Path(setting).expanduser())
    if setting != "none":
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        candidates.append(home / "isotype")
    candidates.append(temporary_folder())
    reasons: list[str] = []
    for candidate in candidates:
        try:
            folder = make_private_folder(candidate)
        except OSError as error:
            reasons.append(f"{candidate}: {error.strerror}")
            continue
        except NotPrivateError as error:
            warn_of_shared_folder(str(error))
            reasons.append(str(error))
            continue
        if os.access(folder, os.W_OK):
            return folder
        reasons.append(f"{folder} cannot be written")
    raise BuildError(
        "no folder for compiled kernels that only this user can change: set ISOTYPE_CACHE to one"
        f" ({'; '.join(reasons)})"
    )


@cache
def warn_of_shared_folder(reason: str) -> None:
    print(
        f"isotype: compiled C++ kernels are kept elsewhere: {reason}", file=sys.stderr, flush=True
    )
