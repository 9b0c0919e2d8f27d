"""Chooses the task for a configuration, and trains it or plans its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.load import LoadedConfig
from ..config.schema import RunConfig
from ..training.callbacks import Callback, Objective
from ..training.console import RunConsole
from ..training.plan import Plan
from ..training.plan import plan_run as plan_task
from ..training.run import train as train_task
from ..training.task import Task


def choose_task(config: RunConfig) -> Task:
    """Returns the task for a configuration."""
    if detect_run_kind(config) == DIFFUSION:
        from .diffusion.task import DiffusionTask

        return DiffusionTask(config)
    from .language.task import LanguageTask

    return LanguageTask(config)


def train(
    loaded: LoadedConfig,
    *,
    resume: Path | None = None,
    console: RunConsole | None = None,
    skips: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
) -> int:
    """Trains a configuration to the end of the run and returns the exit status. On Ctrl-C, saves a
    checkpoint and returns 130. Raises IsotypeError.
    """
    return train_task(
        loaded,
        choose_task(loaded.config),
        resume=resume,
        console=console,
        skips=skips,
        callbacks=callbacks,
        objective=objective,
    )


def plan_run(loaded: LoadedConfig, *, device: str | None = None, gpus: int | None = None) -> Plan:
    """Describes what `train` would do. Raises UsageError in the same cases as `train`.

    device  the name of a device to plan for, if it is not the device of this machine
    gpus    if set, also plans for this number of processes, each on its own GPU
    """
    return plan_task(choose_task(loaded.config), loaded.sources, device=device, gpus=gpus)
