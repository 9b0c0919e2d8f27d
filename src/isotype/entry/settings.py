"""The configuration of a run as it was asked for, from the command line or from Python: loaded, and complete enough to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.load import LoadedConfig, load
from ..errors import UsageError
from .complete import refuse_incomplete


def load_settings(
    file: Path | None,
    arguments: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    preset: str | None,
    resume: Path | None,
    how_to_change: str,
    **options: Any,
) -> LoadedConfig:
    """A new run's settings, or with `resume` those of the run in that folder with changes.

    arguments      `section.key=value`, over the file's
    flags          section.key -> value, over both; None is left out
    how_to_change  the fix where a resumed run is given a file: how its settings are changed instead
    options        further ones of `config.load.load`
    Raises         UsageError for settings that are wrong or missing
    """
    if resume is not None:
        from ..runs.folder import require_run

        if file is not None:
            raise UsageError(f"{file}: a resumed run has its own configuration", fix=how_to_change)
        file = require_run(resume) / "resolved.yaml"
    loaded = load(file, arguments, flags or {}, preset=preset, resolved=resume is not None, **options)
    refuse_incomplete(loaded)
    return loaded


def of_this_start(loaded: LoadedConfig, resume: Path | None) -> tuple[LoadedConfig, Path | None]:
    """The settings, and the folder of the run to go on with: where torchrun repeats a command after a process died, its own run's.

    Raises  UsageError where the repeated command could not find its run
    """
    from ..distributed.restart import run_to_go_on_with

    if resume is not None or (begun := run_to_go_on_with(loaded.config.run.folder)) is None:
        return loaded, resume
    return load_settings(None, preset=None, resume=begun, how_to_change=""), begun
