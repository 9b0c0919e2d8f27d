"""What plan.json keeps of a run's settings: a file of them that is edited between two parts of a run is told."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config.load import LoadedConfig, load
from ..config.schema import RunConfig
from ..runs.folder import RESOLVED, RunFolder
from .console import RunConsole

SETTINGS, GIVEN = "settings", "given"  # in plan.json


def given_files(loaded: LoadedConfig) -> dict[str, str]:
    """The files that a new run's settings were given in, each with a checksum: the user's own, and its copy in the run folder."""
    own = {str(loaded.path.absolute()): _checksum(loaded.path.read_bytes())} if loaded.path is not None else {}
    return own | {"config.yaml": _checksum(loaded.text.encode())}


def recorded(folder: RunFolder) -> dict[str, Any]:
    """plan.json; empty where there is none that can be read."""
    try:
        found = folder.read_json("plan.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def settings_before(folder: RunFolder) -> RunConfig:
    """The settings with which the run was last started, from plan.json; a run from before they were kept there has resolved.yaml alone."""
    try:
        return RunConfig.model_validate(recorded(folder)[SETTINGS])
    except (KeyError, ValidationError):
        return load(folder.path / RESOLVED, [], {}).config


def say_edited(folder: RunFolder, console: RunConsole) -> None:
    """Names the files of settings that were changed and that a resumed run does not read."""
    for name, checksum in recorded(folder).get(GIVEN, {}).items():
        path = folder.path / name  # an absolute name stays as it is
        try:
            changed = _checksum(Path(path).read_bytes()) != checksum
        except OSError:
            continue
        if changed:
            console.say(
                f"note      {path} has changed since the run was begun; a resumed run does not read it: give changes as section.key=value"
            )


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
