"""Chooses the task for a configuration, and trains it or plans its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.load import LoadedConfig
from ..config.schema import RunConfig
from ..environment.hub import print_status
from ..errors import UsageError
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
    plan = plan_task(choose_task(loaded.config), loaded.sources, device=device, gpus=gpus)
    is_gpu = plan.hardware.kind in ("cuda", "rocm")
    if plan.fits is False and is_gpu and gpus is None and loaded.config.adapter.kind != "none":
        return replace(plan, alternatives=plan_smaller_runs(loaded, device))
    return plan


# settings that need less memory, in the order in which a user would try them: each changes the run
# more than the one before
_SMALLER_RUNS: tuple[dict[str, str], ...] = (
    {},
    {"precision.base": "fp8"},
    {"precision.base": "nf4"},
    {"precision.base": "fp8", "model.offload": "blocks"},
    {"precision.base": "nf4", "model.offload": "blocks"},
)


def plan_smaller_runs(loaded: LoadedConfig, device: str | None) -> dict[str, int]:
    """Plans the run again with several combinations of settings that need less memory: recomputed
    layers, micro-batches of one row, a quantised base model, and frozen blocks in host memory.
    Returns a mapping from each combination to its peak memory in bytes. A combination that is not
    valid for this run is left out.
    """
    config = loaded.config
    print_status("the run does not fit: planning it with settings that need less memory")
    settings_of_all: dict[str, Any] = {"train.gradient_checkpointing": "layers"}
    if config.train.batch_size > 1:
        rows = config.train.batch_size * config.train.accumulate
        settings_of_all |= {"train.batch_size": 1, "train.accumulate": rows}
    peaks = {}
    for smaller in _SMALLER_RUNS:
        settings = {**settings_of_all, **smaller}
        changed = config
        for key, value in settings.items():
            section, _, name = key.partition(".")
            update = {name: value}
            changed = changed.model_copy(
                update={section: getattr(changed, section).model_copy(update=update)}
            )
        try:
            plan = plan_task(choose_task(changed), loaded.sources, device=device)
        except UsageError:
            continue
        text = " ".join(f"{key}={value}" for key, value in settings.items())
        peaks[text] = plan.peak
    return peaks
