"""Does the part of a run's preparation that needs no weights: it prepares the device, the precision
and the data. `isotype train` and `isotype plan` both call this module first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..config.kind import DIFFUSION, detect_run_kind
from ..config.schema import AdapterSection, RunConfig
from ..distributed.world import ALONE, World
from ..environment.hardware import Hardware, detect
from ..errors import raise_first_refusal
from ..model.build import resolve_precision
from ..precision.resolution import Resolved
from ..runs.checkpoint.snapshot import seed_generators
from ..wording import format_binary_bytes
from .memory.blocks import check_offload
from .memory.device import memory_limit
from .memory.recomputation import check_settings
from .optimizer import check_optimizer
from .task import Task

WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass
class DeviceSetup:
    """The parts of a run that are prepared before a model is loaded.

    hardware       what is known of the device, such as its memory and its native dtypes
    resolved       the precision of the run, with the reason for each dtype
    process_bytes  on a CPU, the largest number of bytes that this process used before it loaded a
                   model; 0 if it was not measured
    """

    hardware: Hardware
    device: torch.device
    resolved: Resolved
    process_bytes: int


def prepare_data(
    task: Task,
    sources: Mapping[str, str],
    hardware: Hardware | None = None,
    *,
    world: World = ALONE,
) -> DeviceSetup:
    """Prepares the device and the precision, then the data. Checks that take little time come
    first, so that mistakes are found within seconds. Raises UsageError.

    hardware  the device to prepare for; by default the device in this machine
    """
    device_setup = check_run(task, sources, hardware, world=world)
    train = task.config.train
    seed_everything(train.seed, deterministic=train.deterministic)
    world.record_progress(0, "reading the data")
    # the first process tokenises the rows, and the others read them from the cache
    world.run_on_first_then_others(task.load_data)
    return device_setup


def check_run(
    task: Task,
    sources: Mapping[str, str],
    hardware: Hardware | None = None,
    *,
    world: World = ALONE,
) -> DeviceSetup:
    """Checks the settings of a run, and prepares the device and the precision. Raises UsageError."""
    config = task.config
    hardware = _share_memory(hardware or detect(config.model.device), world)
    device = torch.device("cuda" if hardware.kind in ("cuda", "rocm") else "cpu")
    check_settings(config.train, device_type=device.type)
    check_offload(config, device_type=device.type)
    check_adapters(config)
    check_optimizer(config, sources, device_type=device.type)
    resolved = _resolve_for_memory(task, sources, hardware)
    task.check(resolved.precision)
    return DeviceSetup(hardware, device, resolved, process_bytes=0)


def resolve_run_precision(
    task: Task, sources: Mapping[str, str], *, world: World = ALONE
) -> Resolved:
    """Determines every dtype of a run on this machine. Raises UsageError, which lists every
    contradiction.
    """
    hardware = _share_memory(detect(task.config.model.device), world)
    return _resolve_for_memory(task, sources, hardware)


def _share_memory(hardware: Hardware, world: World) -> Hardware:
    """The processes of a machine share the memory of its CPU."""
    if hardware.kind != "cpu":
        return hardware
    return replace(hardware, memory=hardware.memory // world.local_size)


def _resolve_for_memory(task: Task, sources: Mapping[str, str], hardware: Hardware) -> Resolved:
    """On a CPU without bf16 instructions `auto` chooses fp32, and bf16-lora if the frozen weights
    fit into the memory in bf16 only. The size of the memory decides, and not what is free at the
    moment, so that a resumed run makes the same choice.
    """
    resolved = resolve_precision(task.config, sources, hardware, task.roles)
    is_chosen = task.config.precision.preset in (None, "auto")
    if not is_chosen or task.config.adapter.kind == "none" or hardware.kind != "cpu":
        return resolved
    if resolved.preset != "fp32" or resolved.precision.base != "fp32" or not hardware.memory:
        return resolved
    limit = memory_limit(hardware.memory)
    if _fits_in_fp32(task.config, limit):
        return resolved
    weights = task.count_base_weights()
    fp32_bytes = 4 * (weights or 0)
    if fp32_bytes <= limit or fp32_bytes // 2 > limit:
        return resolved
    reason = (
        f"in fp32 the base takes {format_binary_bytes(fp32_bytes)}, and a run can use"
        f" {format_binary_bytes(limit)} of this machine's memory"
    )
    return resolve_precision(task.config, sources, hardware, task.roles, needs_bf16=reason)


def _fits_in_fp32(config: RunConfig, limit: int) -> bool:
    """Whether the files of a local base are so small that its weights fit into `limit` bytes in
    fp32. Each weight takes at least one byte in its file.
    """
    if config.model.name is None:
        return True
    path = Path(config.model.name).expanduser()
    files = [path] if path.is_file() else [*path.rglob("*")] if path.is_dir() else []
    size = sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES)
    return 0 < 4 * size <= limit


def check_adapters(config: RunConfig) -> None:
    """Raises UsageError for adapter settings that would have no effect."""
    run = config.run
    adapter = config.adapter
    no_effect = "has no effect with adapter.kind: none"
    defaults = AdapterSection()

    def changed_keys(*keys: str) -> list[str]:
        return [key for key in keys if getattr(adapter, key) != getattr(defaults, key)]

    new_adapter_keys = changed_keys(
        "dora", "rank_pattern", "alpha_pattern", "start", "train_tokens"
    )
    is_lokr = adapter.kind == "lokr"
    raise_first_refusal(
        (
            run.adapters_every is not None and adapter.kind == "none",
            f"run.adapters_every: {no_effect}",
            "run.save_every: checkpoints hold every weight",
        ),
        (
            run.adapters_keep is not None and run.adapters_every is None,
            "run.adapters_keep: has no effect without run.adapters_every",
            "run.adapters_every: 500",
        ),
        *(
            (
                adapter.kind == "none",
                f"adapter.{key}: {no_effect}",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in [*new_adapter_keys, *changed_keys("plus", "start_from")]
        ),
        *(
            (
                adapter.start_from is not None,
                (
                    f"adapter.{key}: has no effect with adapter.start_from, whose adapter keeps its"
                    " own settings"
                ),
                f"remove adapter.{key}",
            )
            for key in new_adapter_keys
        ),
        (
            is_lokr and detect_run_kind(config) != DIFFUSION,
            "adapter.kind: lokr is offered for pictures",
            "adapter.kind: lora",
        ),
        *(
            (
                is_lokr,
                f"adapter.{key}: has no effect with adapter.kind: lokr",
                f"remove adapter.{key}, or adapter.kind: lora",
            )
            for key in changed_keys("dropout", "rslora", "dora", "plus", "start")
        ),
        (
            not is_lokr and adapter.factor is not None,
            f"adapter.factor: has no effect with adapter.kind: {adapter.kind}",
            "remove adapter.factor, or adapter.kind: lokr",
        ),
        (
            run.adapter_format == "comfyui" and adapter.dora,
            "adapter.dora: not offered with run.adapter_format: comfyui",
            "remove adapter.dora, or run.adapter_format",
        ),
        *(
            (
                config.train.optimizer == "prodigy",
                f"adapter.{key}: prodigy has one rate for all weights",
                f"remove adapter.{key}, or another train.optimizer",
            )
            for key in changed_keys("plus", "text_encoder_rate")
        ),
    )


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seeds all random generators. If `deterministic` is true, also forbids nondeterministic
    algorithms.
    """
    seed_generators(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
