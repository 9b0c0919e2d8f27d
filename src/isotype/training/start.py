"""Writes the files that describe a run before its first step, and the rows of its header."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.load import LoadedConfig, config_of
from ..config.write import resolved_yaml
from ..distributed.world import ALONE, World
from ..environment.versions import environment
from ..model.adapter import trainable_share
from ..model.architecture import AUTO, attention_of, has_attention
from ..model.architecture import attention_line as attention_of_transformers
from ..optimize import joint_attention
from ..precision.parts import local_part
from ..precision.precision import Precision
from ..runs.folder import RESOLVED, RunFolder
from ..wording import counted
from .console import size
from .memory.device import returns_freed_blocks
from .resume import DATA, OBJECTIVE, OTHER_ROWS, SETTINGS, had_other_rows
from .schedule import Milestones
from .setup import Prepared
from .task import Task


def write_start(
    loaded: LoadedConfig, task: Task, prepared: Prepared, plan: Milestones, folder: RunFolder, world: World, objective: str | None, *,
    resuming: bool,
) -> None:  # fmt: skip
    """Writes a new run's `resolved.yaml` last, since it marks the folder as a run. `objective`: the name of a user's own."""
    (folder.path / "result.json").unlink(missing_ok=True)  # of the part that a resumed run goes on from
    if not resuming:
        folder.metrics.unlink(missing_ok=True)
        folder.write_text("config.yaml", loaded.text)  # as given at first; a resumed run reads resolved.yaml
    folder.write_json("env.json", environment())
    folder.write_json("manifest.json", prepared.manifest.to_dict())
    task.begin(folder.path, resuming=resuming)
    for name, content in task.records().items():
        if name == "data.json" and resuming and had_other_rows(folder):
            content = content | {"notes": [*content.get("notes", []), OTHER_ROWS]}
        folder.write_json(name, content)
    trainable, total = trainable_share(prepared.model)
    shared: dict[str, Any] = {"processes": world.size, "machines": world.nodes}
    compared = {OBJECTIVE: objective, DATA: task.fingerprints()}
    reasons = {f"precision.{role}": reason for role, reason in prepared.resolved.reasons.items()}
    reasons["precision.preset"] = prepared.resolved.why_preset
    values = {f"precision.{role}": value for role, value in prepared.resolved.precision.items()}
    values["precision.preset"] = prepared.resolved.preset
    if base := prepared.resolved.from_checkpoint:
        precision = loaded.config.precision.model_copy(update={"base": base})
        sources = {**loaded.sources, "precision.base": prepared.resolved.reasons["base"]}
        loaded = replace(loaded, config=loaded.config.model_copy(update={"precision": precision}), sources=sources)
    if loaded.config.model.attention == AUTO and has_attention(prepared.model):
        values["model.attention"] = attention_of(prepared.model)
        reasons["model.attention"] = attention_of_transformers(prepared.model, AUTO)
    if loaded.config.train.gradient_checkpointing == "auto":
        settings = prepared.checkpointing.as_settings()
        values |= settings
        reasons |= dict.fromkeys(settings, prepared.checkpointing.reason)
    resolved = resolved_yaml(in_its_folder(loaded, folder) if resuming else loaded, reasons, values)
    settings = {SETTINGS: config_of(resolved, RESOLVED).model_dump(mode="json")}
    counts = {"task": task.kind, "parameters": total, "trained": trainable}
    if resuming:  # settings that a kill keeps out of plan.json are found in resolved.yaml, and compared with plan.json's again
        folder.write_text(RESOLVED, resolved)
    folder.write_json("plan.json", {**asdict(plan), **counts, **compared, **shared, **settings})
    if not resuming:
        folder.write_text(RESOLVED, resolved)


def in_its_folder(loaded: LoadedConfig, folder: RunFolder) -> LoadedConfig:
    """The settings of a resumed run, with the folder that it is in: it may have been copied or renamed."""
    given = loaded.config.run.folder
    if "{name}" in given or Path(given).resolve() == folder.path.resolve():
        return loaded
    run = loaded.config.run.model_copy(update={"folder": str(folder.path)})
    config = loaded.config.model_copy(update={"run": run})
    return replace(loaded, config=config, sources={**loaded.sources, "run.folder": "where the run was resumed"})


def header_rows(task: Task, prepared: Prepared, plan: Milestones, folder: RunFolder, world: World = ALONE) -> list[tuple[str, str]]:
    """Environment, model, precision, data, memory and schedule: what will happen, on one screen."""
    config = task.config
    hardware, resolved, train = prepared.hardware, prepared.resolved, config.train
    trainable, total = trainable_share(prepared.model)
    p = resolved.precision
    how = f"{config.adapter.kind} r={config.adapter.r}" if config.adapter.kind != "none" else "every weight"
    weights = sum(local_part(p).numel() * p.element_size() for p in prepared.model.parameters())
    line = attention_line(prepared.model, config.model.attention, p, device_type=prepared.device.type)
    rows = [
        ("run", str(folder.path)),
        ("device", f"{hardware.name}, torch {torch.__version__}"),
        *_processes_row(world, prepared, config.parallel.kind),
        ("model", f"{task.base_name}  {total:,} parameters, {trainable:,} trained ({trainable / total:.2%}, {how})"),
        ("precision", f"{resolved.text}  ({resolved.why_preset})"),
        ("", "  ".join(f"{role} {value}" for role, value, _ in resolved.rows())),
        *task.header(),
        *[("ops" if i == 0 else "", line) for i, line in enumerate(prepared.manifest.lines())],
        *([("attention", line)] if line else []),
        ("recompute", str(prepared.checkpointing)),
        (
            "memory",
            f"weights {size(weights)} of {size(hardware.memory)}; isotype plan estimates the peak, each step shows the measured one"
            + ("; freed memory is given back at once, since it may become scarce" if returns_freed_blocks() else ""),
        ),
        (
            "schedule",
            f"{counted(plan.total, 'step')} of {train.batch_size} x {train.accumulate} {task.words.row}s, "
            f"learning rate {train.learning_rate:g} {train.schedule}",
        ),
    ]
    return [*rows, *[("warning", f"{f.code} {f.message}; {f.fix}") for f in resolved.warnings]]


def _processes_row(world: World, prepared: Prepared, kind: str) -> list[tuple[str, str]]:
    if world.size == 1:
        return [("processes", f"1: parallel.kind: {kind} has no effect")] if kind in ("shard", "hybrid") else []
    batching = prepared.batching
    where = "on one machine" if world.nodes == 1 else f"on {world.nodes} machines"
    each = f"{len(batching.own)} x {batching.rows} rows of each step"
    return [("processes", f"{world.size} {where}, started by {world.launcher}, {world.backend}: {prepared.parallel}, each computes {each}")]


def attention_line(model: nn.Module, asked: str, precision: Precision, *, device_type: str) -> str:
    """The implementation and why it is that one; of diffusers' models the back ends of their layers; "" where neither is known.

    asked  `model.attention`
    """
    return attention_of_transformers(model, asked) or joint_attention.said(model, precision.compute, device_type=device_type)
