"""Chooses the task of a configuration, and trains or plans it."""

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
    """The task of a configuration."""
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
    """Runs a configuration to its end, or saves and returns 130 on Ctrl-C. Raises IsotypeError;
    returns the exit status.
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
    """What `train` would do, here or on another `device`, on so many `gpus` too.

    Raises  UsageError as it would
    """
    return plan_task(choose_task(loaded.config), loaded.sources, device=device, gpus=gpus)
