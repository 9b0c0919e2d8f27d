"""Makes the header of a run, which is printed before step 1. The header has a short part, which is
always shown, and details, which are shown only if the user asks for them.
"""

from __future__ import annotations

import torch
from torch import nn

from ..config.schema import AdapterSection
from ..distributed.world import World
from ..model.adapter import trainable_share
from ..model.architecture import describe_attention as attention_of_transformers
from ..optimize import joint_attention
from ..precision.parts import local_part
from ..precision.precision import Precision
from ..precision.resolution import Resolved
from ..runs.folder import LOG, RunFolder
from ..wording import format_bytes, pluralise
from .console import format_duration
from .duration import format_parts, part_seconds
from .memory.device import returns_freed_blocks
from .memory.recomputation import NONE
from .schedule import RunSchedule
from .setup import Prepared, Trial
from .task import HeaderRows, Task


def header_rows(
    task: Task,
    prepared: Prepared,
    schedule: RunSchedule,
    folder: RunFolder,
    world: World,
    trial: Trial,
) -> HeaderRows:
    """Returns the rows of a run's header that are always shown. These rows describe the model, the
    data with an example, the precision, the memory, the time and the schedule.

    trial  the measurements of the trial step before step 1
    """
    hardware = prepared.hardware
    train = task.config.train
    trainable, total = trainable_share(prepared.model)
    checkpointing = prepared.checkpointing
    rows = [
        ("run", str(folder.path)),
        ("device", f"{hardware.name}, torch {torch.__version__}"),
        *_processes_row(world, prepared, task.config.parallel.kind),
        (
            "model",
            (
                f"{task.base_name}  {total:,} parameters, {trainable:,} trained"
                f" ({trainable / total:.2%}, {_describe_adapter(task.config.adapter)})"
            ),
        ),
        *task.header(),
        ("precision", _summarise_precision(prepared.resolved, task.config.adapter)),
        ("", "\n".join(prepared.manifest.notes)),
        ("memory", _describe_memory(prepared, trial)),
        # a run without recomputation says this in the details
        *([] if checkpointing.kind == NONE else [("recompute", str(checkpointing))]),
        ("time", _describe_time(task, schedule, trial)),
        (
            "schedule",
            (
                f"{pluralise(schedule.total, 'step')} of {train.batch_size} x {train.accumulate}"
                f" {task.metric_names.row_noun}s, learning rate {train.learning_rate:g} {train.schedule}"
            ),
        ),
        ("", schedule.describe_evaluation(task.metric_names.row_noun)),
        *[
            ("warning", f"{warning.code} {warning.message}; {warning.fix}")
            for warning in prepared.resolved.warnings
        ],
    ]
    return [(label, text) for label, text in rows if text]


def detail_rows(task: Task, prepared: Prepared) -> HeaderRows:
    """Returns the rows that are printed only with `--verbose`. The log always contains them. They
    show the dtype of each role (the base weights, the trainable weights, the gradients and so on)
    and the reason for the precision preset. They also show the sources of the data, the ops in each
    part of the model, the attention implementation and the recomputation.
    """
    resolved = prepared.resolved
    checkpointing = prepared.checkpointing
    attention_text = attention_line(
        prepared.model,
        task.config.model.attention,
        resolved.precision,
        device_type=prepared.device.type,
    )
    if returns_freed_blocks():
        memory_text = (
            "freed memory is given back to the system at once, because little memory may be left"
        )
    else:
        memory_text = ""
    rows = [
        ("precision", f"{resolved.text}  ({resolved.preset_reason})"),
        ("", "  ".join(f"{role} {value}" for role, value, _ in resolved.list_roles())),
        *task.header_details(),
        ("ops", "\n".join(prepared.manifest.lines())),
        ("attention", attention_text),
        *([("recompute", str(checkpointing))] if checkpointing.kind == NONE else []),
        ("memory", memory_text),
    ]
    return [(label, text) for label, text in rows if text]


def details_hint(folder: RunFolder) -> HeaderRows:
    """Returns a row that says where to find the details. This row is shown if the header itself
    does not contain the details.
    """
    return [
        (
            "details",
            f"dtype of weights, gradients and the rest, ops, layers: {folder.path / LOG}, or --verbose",
        )
    ]


def _describe_adapter(adapter: AdapterSection) -> str:
    if adapter.kind == "none":
        return "every weight"
    if adapter.start_from is not None:  # adapter.r has no effect
        return f"{adapter.kind}, ranks of adapter.start_from"
    return f"{adapter.kind} r={adapter.r}"


def _summarise_precision(resolved: Resolved, adapter: AdapterSection) -> str:
    """Returns the precision in one line. If `auto` chose the precision, the line says this, but the
    reason for the choice is shown only with the details.
    """
    values = {role: value for role, value, _ in resolved.list_roles()}
    source = " (auto)" if resolved.preset_reason.startswith("auto") else ""
    base_text = "" if adapter.kind == "none" else f"base {values['base']}, "
    return (
        f"{resolved.text}{source}: {base_text}trained {values['trainable']},"
        f" compute {values['compute']}"
    )


def _describe_memory(prepared: Prepared, trial: Trial) -> str:
    """Returns a text with the memory that the trial step used. If there was no trial step, returns
    the size of the weights.
    """
    hardware = prepared.hardware
    limit_text = f" of {format_bytes(hardware.memory)}" if hardware.memory else ""
    if trial.peak_bytes:
        peak_text = format_bytes(trial.peak_bytes)
        return f"about {peak_text}{limit_text}: a trial step of the longest rows used this"
    weight_bytes = sum(
        local_part(p).numel() * p.element_size() for p in prepared.model.parameters()
    )
    return f"weights {format_bytes(weight_bytes)}{limit_text}; each step shows the measured peak"


def _describe_time(task: Task, schedule: RunSchedule, trial: Trial) -> str:
    """Returns a text with an estimate of the run's time, or "" if no batch was timed. The estimate
    is a sum of the times for the steps, the evaluations, the samples and the check of the result.
    """
    if trial.batch_seconds is None:
        return ""
    parts = part_seconds(task, schedule, trial.batch_seconds, trial.sample_seconds or 0.0)
    is_complete = trial.sample_seconds is not None or not task.samples or not schedule.sample_every
    omission_text = "" if is_complete else " without samples"
    mean_size = task.mean_sizes.training
    mean_text = f", an average batch {mean_size:.0%} of that" if mean_size < 1 else ""
    return (
        f"about {format_duration(sum(parts.values()))}{omission_text}: {format_parts(parts)};"
        f" a batch of the longest rows takes {trial.batch_seconds:.2g} s{mean_text}"
    )


def _processes_row(world: World, prepared: Prepared, kind: str) -> HeaderRows:
    """Returns the row about the processes of the run, or no row for a single process.

    kind  the value of the setting `parallel.kind`
    """
    if world.size == 1:
        if kind in ("shard", "hybrid"):
            return [("processes", f"1: parallel.kind: {kind} has no effect")]
        return []
    batching = prepared.batching
    machines = "on one machine" if world.nodes == 1 else f"on {world.nodes} machines"
    share_text = (
        f"{len(batching.local_micro_batches)} x {batching.micro_batch_size} rows of each step"
    )
    return [
        (
            "processes",
            (
                f"{world.size} {machines}, started by {world.launcher}, {world.backend}:"
                f" {prepared.parallel}, each computes {share_text}"
            ),
        )
    ]


def attention_line(
    model: nn.Module, implementation: str, precision: Precision, *, device_type: str
) -> str:
    """Returns a text that names the attention implementation and the reason for it. For a diffusers
    model, it lists the attention back ends of the layers. Returns "" if the attention
    implementation is not known.

    implementation  the value of the setting `model.attention`
    """
    return attention_of_transformers(model, implementation) or joint_attention.describe_backends(
        model, precision.compute, device_type=device_type
    )
