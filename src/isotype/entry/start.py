"""Starts a run whose settings are loaded: what `isotype.train`, the commands and both quickstarts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config.load import LoadedConfig
from ..runs.folder import RunFolder
from ..tasks.choose import train
from ..training.callbacks import Callback, Objective
from ..training.console import RunConsole


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    status  the exit status: 0 done, 130 interrupted
    folder  the run's
    begun   whether the folder holds a run; a run that was interrupted before its first step leaves none
    """

    status: int
    folder: Path
    begun: bool


def start(
    loaded: LoadedConfig, *, resume: Path | None = None, console: RunConsole | None = None, skips: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (), objective: Objective | None = None,
) -> Ended:  # fmt: skip
    """Runs to the end, or saves on Ctrl-C. Raises IsotypeError.

    resume     the folder of the run to go on with
    console    shows the progress; by default on stdout
    skips      checks of the preflight to leave out, code to reason
    callbacks  called after steps, evaluations, saves and samples
    objective  computes the losses instead of the task's function
    """
    console = console or RunConsole()
    status = train(loaded, resume=resume, console=console, skips=skips, callbacks=callbacks, objective=objective)
    folder = Path(console.result["folder"])
    return Ended(status, folder, RunFolder(folder).is_run)
