"""What a run prints before its first step and after its last one."""

from __future__ import annotations

from typing import Any

import torch

from ..counted import counted
from ..distributed.world import ALONE, World
from ..model.adapter import trainable_share
from ..precision.parts import local_part
from ..runs.folder import RunFolder
from .attention_line import attention_line
from .console import RunConsole, duration, size
from .memory.device import returns_freed_blocks
from .milestones import Milestones
from .setup import Prepared
from .task import Task


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
            f"{counted(plan.total, 'step')} of {train.batch_size} x {train.accumulate} rows, "
            f"learning rate {train.learning_rate:g} {train.schedule}",
        ),
    ]
    return [*rows, *[("warning", f"{f.code} {f.message}; {f.fix}") for f in resolved.warnings]]


def _processes_row(world: World, prepared: Prepared, kind: str) -> list[tuple[str, str]]:
    if world.size == 1:
        return [("processes", f"1: parallel.kind: {kind} has no effect")] if kind in ("shard", "hybrid") else []
    passes = prepared.passes
    where = "on one machine" if world.nodes == 1 else f"on {world.nodes} machines"
    each = f"{len(passes.own)} x {passes.rows} rows of each step"
    return [("processes", f"{world.size} {where}, started by {world.launcher}, {world.backend}: {prepared.parallel}, each computes {each}")]


def say_result(result: dict[str, Any], console: RunConsole) -> None:
    where = result.get("adapter") or result.get("model")
    console.say()
    console.say(f"done      {counted(result['steps'], 'step')} in {duration(result['trained_seconds'])}" + _best(result))
    console.say(f"saved     {where}")
    check = result["check"]
    losses = f"loss {check['reloaded_loss']:.4f}, trained {check['trained_loss']:.4f}"
    console.say(f"checked   loaded into a fresh base: {losses}, on {counted(check['rows'], 'row')}")
    if "report" in result:
        console.say(f"report    {result['report']}")


def _best(result: dict[str, Any]) -> str:
    best, step = result.get("best_eval_loss"), result.get("best_step")
    if best is None:
        return ""
    return f", best evaluation loss {best:.4f} at step {step}" if step else f", no evaluation lower than {best:.4f}, that before step 1"
