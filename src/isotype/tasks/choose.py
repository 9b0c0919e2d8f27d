"""Chooses the task for a configuration, and trains it or plans its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from ..training.device_setup import check_run
from ..training.memory.blocks import BLOCKS
from ..training.memory.device import memory_limit
from ..training.memory.recomputation import OFFLOAD
from ..training.plan import Plan, plan_peaks
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
        return replace(plan, alternatives=plan_smaller_runs(loaded, plan))
    return plan


_DENSE_BITS = 16
# quantised bases with which a smaller run is planned, with their bits per weight. The plans of int8
# and fp8 are equal, because a weight of both has 8 bits, and a row of the weights has one scale
_BASE_BITS = {"int8": 8, "fp8": 8, "nf4": 4}


def plan_smaller_runs(loaded: LoadedConfig, plan: Plan) -> dict[str, int]:
    """Plans the run again with several combinations of settings that need less memory: recomputed
    layers, micro-batches of one row, a quantised base model, and frozen blocks in host memory. If
    the run fits with none of them, the inputs of the layers are kept in host memory too. A clip of
    33 frames of 640 x 640 has 5.5 GiB of them in Wan 14B.
    Returns a mapping from each combination to its peak memory in bytes. The combinations with
    blocks in host memory come last, because they make a step slower. A combination that is not
    valid for this run is left out.

    plan  the plan of the run with its own settings
    """
    config = loaded.config
    print_status("the run does not fit: planning it with settings that need less memory")
    settings_of_all: dict[str, Any] = {"train.gradient_checkpointing": "layers"}
    if config.train.batch_size > 1:
        rows = config.train.batch_size * config.train.accumulate
        settings_of_all |= {"train.batch_size": 1, "train.accumulate": rows}
    offload = {} if config.model.offload == BLOCKS else {"model.offload": BLOCKS}
    bits = _BASE_BITS.get(plan.resolved.precision.base, _DENSE_BITS)
    smaller_bases = [base for base, base_bits in _BASE_BITS.items() if base_bits < bits]
    peaks = {}
    offload_peaks = {}
    # maps the bits of a base to the peaks without and with blocks in host memory
    peaks_by_bits = dict[int, tuple[int, int | None]]()
    for base in (None, *smaller_bases):
        settings = settings_of_all if base is None else settings_of_all | {"precision.base": base}
        offload_settings = settings | offload
        task = choose_task(_with_settings(config, settings))
        offload_task = choose_task(_with_settings(config, offload_settings)) if offload else None
        base_bits = _DENSE_BITS if base is None else _BASE_BITS[base]
        try:
            if base_bits in peaks_by_bits:
                check_run(task, loaded.sources, plan.hardware)
            else:
                peaks_by_bits[base_bits] = plan_peaks(
                    task,
                    offload_task,
                    loaded.sources,
                    plan.hardware,
                    plan.model_outline if base is None else None,
                )
        except UsageError:
            continue
        peak, offload_peak = peaks_by_bits[base_bits]
        peaks[_format_settings(settings)] = peak
        if offload_peak is not None:
            offload_peaks[_format_settings(offload_settings)] = offload_peak
    peaks |= offload_peaks
    if peaks and min(peaks.values()) > memory_limit(plan.hardware.memory):
        settings = settings_of_all | {"train.gradient_checkpointing": OFFLOAD}
        least_bits = min(peaks_by_bits)
        if least_bits < bits:
            settings["precision.base"] = next(
                base for base in smaller_bases if _BASE_BITS[base] == least_bits
            )
        settings |= offload
        with suppress(UsageError):
            task = choose_task(_with_settings(config, settings))
            peak, _ = plan_peaks(task, None, loaded.sources, plan.hardware)
            peaks[_format_settings(settings)] = peak
    return peaks


def _with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    for key, value in settings.items():
        section, _, name = key.partition(".")
        changed_section = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed_section})
    return config


def _format_settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
